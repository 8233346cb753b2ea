"""Correlations of predictions with labels."""

import numpy as np


def spearman(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Returns Spearman's rank correlation of two arrays [rows]; NaN if one of them is constant."""
    from scipy.stats import spearmanr

    return float(spearmanr(predictions, labels).statistic) if are_varied(predictions, labels) else np.nan


def pearson(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Returns Pearson's correlation of two arrays [rows]; NaN if one of them is constant."""
    from scipy.stats import pearsonr

    return float(pearsonr(predictions, labels).statistic) if are_varied(predictions, labels) else np.nan


def are_varied(*columns: np.ndarray) -> bool:
    """Returns whether no column is empty or constant; the correlation with a constant is undefined."""
    return all(len(column) and np.ptp(column) > 0 for column in columns)
