"""Checkpoints with integer weights for PyTorch: torchao and compressed-tensors."""
