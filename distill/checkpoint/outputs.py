"""What a model with any head answers with, as one tensor of logits."""

from typing import Any

import torch
from torch import Tensor


def find_logits(output: Any) -> Tensor | None:
    """Logits [batch, classes], [batch, length, classes], or of spans [batch, length, 2], the start and then the end;
    None where the model has no head for them.
    """
    if "logits" in output:
        return output["logits"]
    if "start_logits" in output:
        return torch.stack([output["start_logits"], output["end_logits"]], -1)
    return None


def logits_of(output: Any) -> Tensor:
    """As `find_logits`, of a model that has such a head.

    Raises:
        ValueError: The output has no logits.
    """
    logits = find_logits(output)
    if logits is None:
        raise ValueError(f"expected logits in the model's output, found {', '.join(output)}")
    return logits
