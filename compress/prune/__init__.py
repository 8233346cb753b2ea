"""Structured pruning: importance scores, search of a shape within a budget, and smaller vocabularies."""
