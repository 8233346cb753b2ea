"""Stages of the data and the teacher, and what later stages read of them."""
