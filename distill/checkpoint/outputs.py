"""Logits of a model with any head, as one tensor."""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor


def find_logits(output: Mapping[str, object]) -> Tensor | None:
    """Returns the logits in a model's output; None if it has none.

    They are [batch, classes], [batch, length, classes], or for spans [batch, length, 2] (start, end).
    """
    if "logits" in output:
        return cast(Tensor, output["logits"])
    if "start_logits" in output:
        return torch.stack([cast(Tensor, output[name]) for name in ("start_logits", "end_logits")], -1)
    return None


def read_logits(output: Mapping[str, object]) -> Tensor:
    """Returns the logits as `find_logits` does, for a model with a head.

    Raises:
        ValueError: The output has no logits.
    """
    logits = find_logits(output)
    if logits is None:
        raise ValueError(f"expected logits in the model's output, found {', '.join(output)}")
    return logits
