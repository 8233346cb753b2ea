"""Layers at even distances; torch isn't imported here, because specs of students are checked without it."""


def space_layers_evenly(count: int, total: int) -> tuple[int, ...]:
    """Returns `count` evenly spaced layers of `total`, including the first and, for more than one, the last."""
    return (0,) if count == 1 else tuple(round(i * (total - 1) / (count - 1)) for i in range(count))
