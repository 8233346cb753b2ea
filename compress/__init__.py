"""Model compression: pruning, quantization, export and measurement of the resulting models."""
