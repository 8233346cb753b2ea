"""The device on which pruning scores units and trains candidates."""

import torch

from pipelines.runs.strategies.by_layout import choose_device


def choose_search_device(accelerator: str) -> torch.device:
    """Returns the run's GPU; the CPU where there is none, or one that can't sum scores in float64 (MPS)."""
    device = choose_device(accelerator)
    return device if device.type == "cuda" else torch.device("cpu")
