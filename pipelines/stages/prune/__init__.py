"""Stages that prune a student to a budget."""
