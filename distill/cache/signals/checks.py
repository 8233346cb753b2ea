"""Validation of the teacher's outputs before they are stored."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from distill.errors import InputError


def check_width(name: str, values: Tensor, width: int) -> None:
    """Checks the last dimension of the teacher's values.

    Raises:
        InputError: It isn't `width`.
    """
    if values.shape[-1] != width:  # numpy would broadcast one column over all classes
        raise InputError(
            f"teacher: expected {name} of width {width}, found {values.shape[-1]}: values would belong to other classes"
        )


def check_finite_values(name: str, values: Tensor, keys: Sequence[bytes]) -> None:
    """Checks that every number of `values`, with one row per sample or per position, is finite.

    Raises:
        InputError: A number is NaN or infinite.
    """
    finite = values.isfinite().flatten(1).all(1).cpu().numpy()
    if not finite.all():
        raise non_finite_error(name, np.flatnonzero(~finite), len(finite), keys)


def non_finite_error(name: str, numbers: np.ndarray, rows: int, keys: Sequence[bytes]) -> InputError:
    """Returns the error for the rows `numbers` among `rows` rows, which are the samples of `keys` or positions."""
    is_sample = rows == len(keys)
    first = f"sample {keys[numbers[0]].hex()}" if is_sample else f"position {numbers[0]} of a batch of {rows}"
    return InputError(
        f"teacher: expected finite {name}, found {len(numbers)} of {rows} rows with NaN or infinity, the first is "
        f"{first}: the student's weights would become NaN"
    )
