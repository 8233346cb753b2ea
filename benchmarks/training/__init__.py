"""Measurements of training steps, batches, precisions and optimizers."""
