"""Queries, keys and values of a model's layers, as its maps give them."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from distill.errors import InputError

# What families call the three maps of their attention.
MAPS = (("query", "key", "value"), ("q_lin", "k_lin", "v_lin"), ("q_proj", "k_proj", "v_proj"))
Vectors = tuple[Tensor, Tensor, Tensor]  # queries, keys and values, each [batch, length, width]


def attention_maps(model: PreTrainedModel) -> list[tuple[nn.Module, nn.Module, nn.Module]]:
    """Query, key and value maps of every layer, first layer first.

    Raises:
        InputError: A family whose attention keeps them elsewhere.
    """
    found = []
    for module in model.modules():
        for names in MAPS:
            maps = [getattr(module, name, None) for name in names]
            if all(isinstance(each, nn.Linear) for each in maps):
                found.append(tuple(maps))
    if len(found) != model.config.num_hidden_layers:
        raise InputError(
            f"{type(model).__name__}: expected query, key and value maps in {model.config.num_hidden_layers} layers, "
            f"found {len(found)}: attention and relations of this family can't be read"
        )
    return found  # type: ignore[return-value]


@contextmanager
def watching(model: PreTrainedModel) -> Iterator[list[Vectors]]:
    """What the maps gave, layer by layer, once a forward pass inside the block is done."""
    maps = attention_maps(model)
    caught: list[Any] = [[None] * 3 for _ in maps]
    with ExitStack() as hooks:
        for layer, three in enumerate(maps):
            for i, linear in enumerate(three):
                hooks.enter_context(linear.register_forward_hook(partial(keep, caught[layer], i)))
        yield caught


def keep(place: list[Tensor], number: int, module: nn.Module, inputs: Any, output: Tensor) -> None:
    place[number] = output
