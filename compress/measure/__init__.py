"""Latency, memory, and the precision that trains fastest on this machine."""
