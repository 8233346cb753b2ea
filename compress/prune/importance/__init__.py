"""Importance scores of units and layers, and the gates used to measure them and to train masks."""
