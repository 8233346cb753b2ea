"""Quantized checkpoints for PyTorch: torchao and compressed-tensors."""
