"""Cascades of classifiers: calibration, choice of thresholds, and the folder that serves them."""
