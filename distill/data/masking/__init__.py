"""Masked language modelling: masks that depend on the sample and the epoch."""
