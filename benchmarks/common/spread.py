"""Means with their spread over seeds, as tables print them."""

from collections.abc import Sequence
from statistics import mean, stdev


def format_spread(values: Sequence[float], form: str = ".2f") -> str:
    """Returns the mean ± the standard deviation; of one value only the value."""
    return f"{mean(values):{form}}" + (f" ± {stdev(values):{form}}" if len(values) > 1 else "")


def format_percent(shares: Sequence[float]) -> str:
    """Returns the mean of shares in percent ± the standard deviation in points, without the sign."""
    return format_spread([100 * share for share in shares])


def format_accuracy(shares: Sequence[float]) -> str:
    """Returns the mean of shares in percent with the sign ± the standard deviation in points."""
    text = f"{mean(shares):.2%}"
    return f"{text} ± {stdev(shares) * 100:.2f}" if len(shares) > 1 else text


def format_gain(gains: Sequence[float]) -> str:
    """Returns the mean of gains with its sign ± the standard deviation; of one gain only the gain."""
    return f"{mean(gains):+.2f}" + (f" ± {stdev(gains):.2f}" if len(gains) > 1 else "")
