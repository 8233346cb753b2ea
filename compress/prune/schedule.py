"""The cubic schedule of what is pruned: a share of weights, masked units, or a latency."""

from compress.errors import CompressError


def interpolate_cubic(step: int, begin: int, end: int, start: float, target: float) -> float:
    """Returns the value at `step`, such as the pruned share: `start` until `begin`, `target` from `end` on.

    In between it is target + (start - target) u^3, where u is the remaining share of the steps from `begin` to `end`:
    most is pruned early, while the model has the most redundancy.

    Raises:
        CompressError: `end` is before `begin`.

    Source: Zhu and Gupta 2017 (arXiv 1710.01878), equation 1, at every step instead of every delta-t steps.
    """
    if end < begin:
        raise CompressError(
            f"schedule: expected an end at or after step {begin}, found step {end}: it ends before it begins"
        )
    if step < begin or step >= end:
        return start if step < begin else target
    return target + (start - target) * ((end - step) / (end - begin)) ** 3
