"""Combinations of settings that a run refuses: one table, and the checks of kinds of students and layouts."""
