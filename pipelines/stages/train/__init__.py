"""Stages that train a student."""
