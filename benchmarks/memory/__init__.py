"""Measurements of the memory that training takes."""
