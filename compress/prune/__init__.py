"""Structured pruning: tracing of prunable axes, importance scores, search of a shape within a budget, and slicing."""
