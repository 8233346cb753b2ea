"""Measurements of the cache of teacher signals."""
