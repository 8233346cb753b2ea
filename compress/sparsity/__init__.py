"""Sparse training and one-shot pruning of weights: scores, masks, schedules and plain checkpoints with zeros."""
