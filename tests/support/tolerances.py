"""How far values in float32 may lie from one another on any processor: told by a reference in float64."""

import torch
from torch import Tensor

FACTOR = 4  # times the error of the plain way: another order of sums is off by as much, not by the same
STEPS = 8  # roundings of the largest value that add up, where the plain way happens to hit the reference


def bound(naive: Tensor, exact: Tensor, scale: float | None = None) -> float:
    """What float32 may differ by from `exact`, all values of a tensor alike.

    Args:
        naive: The values as the plain way gives them in float32.
        exact: The same in float64.
        scale: The largest of the terms that were summed; that of the values where nothing cancels out.
    """
    naive, exact = naive.detach(), exact.detach()
    largest = float(exact.abs().max()) if scale is None else scale
    return FACTOR * float((naive - exact).abs().max()) + STEPS * torch.finfo(torch.float32).eps * largest


def assert_as_exact(
    found: Tensor, naive: Tensor, exact: Tensor, *, scale: float | None = None, name: str = "values"
) -> None:
    """`found` lies within the `bound` of the reference."""
    error, most = float((found.detach() - exact.detach()).abs().max()), bound(naive, exact, scale)
    assert error <= most, f"{name}: {error:.1e} from the reference in float64, expected at most {most:.1e}"
