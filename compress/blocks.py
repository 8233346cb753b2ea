"""Grouping of a model's layers by the transformer block that contains them, inferred from module names."""

from collections.abc import Mapping
from typing import TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)


def by_block(layers: Mapping[str, M]) -> list[dict[str, M]]:
    """Groups the layers by the block that contains them, ordered by the first layer of each block."""
    blocks: dict[str, dict[str, M]] = {}
    for name, layer in layers.items():
        blocks.setdefault(block_of(name), {})[name] = layer
    return list(blocks.values())


def block_of(name: str) -> str:
    """Returns the block of a layer, or the layer itself outside blocks: `model.layers.3` for
    `model.layers.3.mlp.up_proj`.
    """
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1]) if numbers else name
