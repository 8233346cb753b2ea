"""How much is pruned at which step."""

from compress.errors import CompressError


def cubic(step: int, begin: int, end: int, start: float, target: float) -> float:
    """Share pruned at `step`: `start` until `begin`, `target` from `end` on, between target + (start - target) u^3.

    u is the part of the way from `begin` to `end` that is left: most goes early, while there is the most to spare.

    Raises:
        CompressError: `end` before `begin`.

    Source: Zhu and Gupta 2017 (arXiv 1710.01878), equation 1, at every step instead of every delta-t steps.
    """
    if end < begin:
        raise CompressError(f"a schedule from step {begin} to step {end}: it ends before it begins")
    if step < begin or step >= end:
        return start if step < begin else target
    return target + (start - target) * ((end - step) / (end - begin)) ** 3
