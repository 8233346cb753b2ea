"""Measurements of quantized students and of exports in few bits."""
