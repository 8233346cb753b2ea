"""Measurements of tasks other than the classification of texts, and makers of their data."""
