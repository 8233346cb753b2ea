"""Measurements of quantized students and of low-bit exports."""
