"""Measurement of latency and peak memory, and selection of the fastest training precision on this machine."""
