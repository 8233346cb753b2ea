"""Measurements of speed, memory and quality; each module is a command, `python -m benchmarks.NAME --help`."""
