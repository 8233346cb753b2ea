"""Synthetic examples made from the rows of a data set."""
