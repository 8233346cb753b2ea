"""Logits of a model with any head, as one tensor."""

from typing import Any

import torch
from torch import Tensor


def find_logits(output: Any) -> Tensor | None:
    """Returns logits [batch, classes], [batch, length, classes], or for spans [batch, length, 2] (start, end); None if
    the output has none.
    """
    if "logits" in output:
        return output["logits"]
    if "start_logits" in output:
        return torch.stack([output["start_logits"], output["end_logits"]], -1)
    return None


def logits_of(output: Any) -> Tensor:
    """Returns the logits as `find_logits` does, for a model with a head.

    Raises:
        ValueError: The output has no logits.
    """
    logits = find_logits(output)
    if logits is None:
        raise ValueError(f"expected logits in the model's output, found {', '.join(output)}")
    return logits
