"""Structured pruning: what can go, what should go, how much of it, and taking it out."""
