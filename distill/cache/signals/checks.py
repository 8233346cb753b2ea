"""Validation of the teacher's outputs before they are stored."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from distill.errors import InputError


def check_width(name: str, values: Tensor, width: int) -> None:
    if values.shape[-1] != width:  # numpy would broadcast one column over all classes
        raise InputError(f"teacher: expected {name} of width {width}, found {values.shape[-1]}: not one a class")


def check_finite(name: str, values: Tensor, keys: Sequence[bytes]) -> None:
    """Raises InputError unless every number is finite; `values` have one row per sample or per position."""
    good = values.isfinite().flatten(1).all(1).cpu().numpy()
    if not good.all():
        raise non_finite_error(name, np.flatnonzero(~good), len(good), keys)


def non_finite_error(name: str, bad: np.ndarray, rows: int, keys: Sequence[bytes]) -> InputError:
    first = f"sample {keys[bad[0]].hex()}" if rows == len(keys) else f"position {bad[0]} of a batch of {rows}"
    return InputError(
        f"teacher: {name} that are not finite at {len(bad)} places, the first is {first}: "
        "a student would learn nothing but NaN"
    )
