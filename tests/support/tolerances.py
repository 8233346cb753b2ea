"""Tolerances for float32 results on any processor, derived from a float64 reference."""

import torch
from torch import Tensor

FACTOR = 4  # times the naive error: another summation order has an error of similar size, not the same error
STEPS = 8  # accumulated roundings of the largest value, in case the naive result happens to equal the reference


def float32_tolerance(naive: Tensor, exact: Tensor, scale: float | None = None) -> float:
    """Returns the largest permitted absolute difference of a float32 result from `exact`, for a whole tensor.

    Args:
        naive: Float32 values of the straightforward computation.
        exact: The same values in float64.
        scale: Largest absolute summand; by default the largest absolute value of `exact`, if nothing cancels out.
    """
    naive, exact = naive.detach(), exact.detach()
    largest = float(exact.abs().max()) if scale is None else scale
    return FACTOR * float((naive - exact).abs().max()) + STEPS * torch.finfo(torch.float32).eps * largest


def assert_as_exact(
    found: Tensor, naive: Tensor, exact: Tensor, *, scale: float | None = None, name: str = "values"
) -> None:
    """Checks that `found` is within the `float32_tolerance` of the reference."""
    error, tolerance = float((found.detach() - exact.detach()).abs().max()), float32_tolerance(naive, exact, scale)
    assert error <= tolerance, f"{name}: {error:.1e} from the reference in float64, expected at most {tolerance:.1e}"
