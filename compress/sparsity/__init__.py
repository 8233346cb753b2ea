"""Zeros in the weights: which ones, when, and how they stay zero until a plain checkpoint is written."""
