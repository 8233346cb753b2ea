"""Measurements of speed, memory and quality, by subject; a script is a command: `python -m benchmarks.data.cleaning`."""
