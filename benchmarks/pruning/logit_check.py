"""The check that a file computes the same as PyTorch, before its speed is compared."""

from collections.abc import Callable, Iterable
from typing import TypeVar

import numpy as np

TOLERANCE = 2e-3  # largest difference of logits between runtimes in float32
_Inputs = TypeVar("_Inputs")


def check_logits(
    name: str,
    run: Callable[[_Inputs], np.ndarray],
    reference: Callable[[_Inputs], np.ndarray],
    samples: Iterable[_Inputs],
) -> None:
    """Checks that two models compute the same logits.

    Args:
        name: What is checked.
        run: The deployed model.
        reference: The same model in PyTorch.
        samples: Inputs of both.

    Raises:
        SystemExit: The logits differ.
    """
    for inputs in samples:
        difference = float(np.abs(run(inputs) - reference(inputs)).max())
        if not difference <= TOLERANCE:
            raise SystemExit(
                f"{name}: expected PyTorch's logits to within {TOLERANCE}, found a difference of {difference:.1e}: its "
                "speed would be that of another model"
            )
