"""Masked language modelling: which tokens of a sample are hidden in which epoch."""
