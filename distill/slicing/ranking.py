"""The units of an axis that are kept, by a value for each."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor


def find_highest(values: Float[Tensor, "units"], count: int) -> Int64[Tensor, "kept"]:
    """Returns the indices of the `count` highest values, ascending; the lower index first among equals."""
    return torch.sort(values, descending=True, stable=True).indices[:count].sort().values
