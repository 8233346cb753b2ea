"""Measurements of speed, memory and quality, by subject. Run a script by: `python -m benchmarks.data.cleaning`."""
