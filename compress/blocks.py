"""The layers of a model by the block that they are in, as their names tell."""

from collections.abc import Mapping
from typing import TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)


def by_block(layers: Mapping[str, M]) -> list[dict[str, M]]:
    """The layers in groups of one block of the model each, in the order of their first layers."""
    blocks: dict[str, dict[str, M]] = {}
    for name, layer in layers.items():
        blocks.setdefault(block_of(name), {})[name] = layer
    return list(blocks.values())


def block_of(name: str) -> str:
    """`model.layers.3` of `model.layers.3.mlp.up_proj`; a layer outside of blocks is its own."""
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1]) if numbers else name
