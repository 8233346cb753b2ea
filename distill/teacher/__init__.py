"""Frozen teachers: their settings, fingerprints, and the computation of signals in one or several processes."""
