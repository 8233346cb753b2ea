"""Capture of the queries, keys and values of a model's attention layers."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from distill.errors import InputError

# Names of the query, key and value projections by family, and of a fused projection that outputs all three.
MAPS = (
    ("query", "key", "value"),
    ("q_lin", "k_lin", "v_lin"),
    ("q_proj", "k_proj", "v_proj"),
    ("query_proj", "key_proj", "value_proj"),
)
FUSED = ("Wqkv", "c_attn")
Vectors = tuple[Tensor, Tensor, Tensor]  # queries, keys and values, each [batch, length, width]


def attention_maps(model: PreTrainedModel) -> list[tuple[nn.Module, ...]]:
    """Returns the query, key and value projections of every layer, or its fused projection, in the order of the layers.

    Raises:
        InputError: The projections of this family are not found in every layer.
    """
    found: list[tuple[nn.Module, ...]] = []
    for module in model.modules():
        for names in (*MAPS, *((name,) for name in FUSED)):
            maps = [getattr(module, name, None) for name in names]
            if all(isinstance(each, nn.Module) for each in maps):
                found.append(tuple(maps))  # type: ignore[arg-type]
    if len(found) != model.config.num_hidden_layers:
        raise InputError(
            f"{type(model).__name__}: expected query, key and value maps in {model.config.num_hidden_layers} layers, "
            f"found {len(found)}: attention and relations of this family can't be read"
        )
    return found


def attention_widths(config: Any) -> tuple[int, int, int]:
    """Returns the widths of a layer's queries, keys and values, which differ with grouped-query attention and need not
    equal the hidden width.
    """
    heads = config.num_attention_heads
    inner = getattr(config, "true_hidden_size", config.hidden_size)  # MobileBERT: the width inside its bottlenecks
    head = getattr(config, "head_dim", None) or inner // heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    return heads * head, groups * head, groups * head


@contextmanager
def watching(model: PreTrainedModel) -> Iterator[list[Vectors]]:
    """Yields a list that contains the outputs of the projections, layer by layer, after a forward pass within the
    context; in families with rotary embeddings these are the vectors before the rotation.
    """
    maps = attention_maps(model)
    caught: list[Any] = [[None] * 3 for _ in maps]
    with ExitStack() as hooks:
        for layer, own in enumerate(maps):
            for i, linear in enumerate(own):
                places = slice(None) if len(own) == 1 else slice(i, i + 1)
                hooks.enter_context(linear.register_forward_hook(partial(keep, caught[layer], places)))
        yield caught


def keep(held: list[Tensor], places: slice, module: nn.Module, inputs: Any, output: Tensor) -> None:
    held[places] = output.chunk(3, -1) if places == slice(None) else [output]
