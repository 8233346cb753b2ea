"""Measurements of cleaning, augmentation and selection."""
