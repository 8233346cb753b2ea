"""Measurements of pruned and sparse students, beside other tools' students."""
