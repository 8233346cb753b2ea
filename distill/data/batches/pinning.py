"""Pinned copies of batches, which a GPU reads while it computes."""

from typing import Any, cast

import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor

from distill.data.batches.encode import Batch


def pin_batch(batch: Batch, device: torch.device) -> dict[str, Any]:
    """Returns a batch whose CPU tensors, those in nested signals too, are copied into memory pinned for a GPU.

    Lightning moves batches without waiting for the copy (`non_blocking`), which only overlaps from pinned memory.
    """

    def pin(tensor: Tensor) -> Tensor:
        return tensor.pin_memory() if tensor.device.type == "cpu" else tensor

    with torch.cuda.device(device):  # a thread starts on GPU 0, where pinning would create a context
        return cast(dict[str, Any], apply_to_collection(batch, Tensor, pin))
