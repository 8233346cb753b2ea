"""Quantization of weights and activations, with training that simulates the deployed arithmetic and scales."""
