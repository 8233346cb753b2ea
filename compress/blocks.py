"""Grouping of a model's layers by the transformer block that contains them, inferred from module names."""

from collections.abc import Mapping
from typing import TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)


def group_by_block(layers: Mapping[str, M]) -> list[dict[str, M]]:
    """Groups the layers by the block that contains them, ordered by the first layer of each block."""
    blocks: dict[str, dict[str, M]] = {}
    for name, layer in layers.items():
        blocks.setdefault(find_block(name), {})[name] = layer
    return list(blocks.values())


def find_block(name: str) -> str:
    """Returns the name of a layer's block, or the layer's own name if it is in none.

    The block of `model.layers.3.mlp.up_proj` is `model.layers.3`.
    """
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1]) if numbers else name
