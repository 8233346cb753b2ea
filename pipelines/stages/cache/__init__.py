"""Stages that store the teacher's signals, and the work of the cache command."""
