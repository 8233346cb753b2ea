"""Capture of the queries, keys and values of a model's attention layers."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import cast

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from distill.errors import InputError
from distill.losses.teacher_signals import AttentionVectors

# Names of the query, key and value projections by family, and of a fused projection that outputs all three.
_PROJECTIONS = (
    ("query", "key", "value"),
    ("q_lin", "k_lin", "v_lin"),
    ("q_proj", "k_proj", "v_proj"),
    ("query_proj", "key_proj", "value_proj"),
)
_FUSED_PROJECTIONS = ("Wqkv", "c_attn")


def find_attention_projections(model: PreTrainedModel) -> list[tuple[nn.Module, ...]]:
    """Returns the query, key and value projections of every layer, or its fused projection, in the order of the layers.

    Raises:
        InputError: The projections of this family are not found in every layer.
    """
    layer_projections: list[tuple[nn.Module, ...]] = []
    for module in model.modules():
        for names in (*_PROJECTIONS, *((name,) for name in _FUSED_PROJECTIONS)):
            projections = [getattr(module, name, None) for name in names]
            modules = tuple(each for each in projections if isinstance(each, nn.Module))
            if len(modules) == len(names):
                layer_projections.append(modules)
    layers = model.config.num_hidden_layers
    if len(layer_projections) != layers:
        raise InputError(
            f"{type(model).__name__}: expected query, key and value projections in {layers} layers, found them in "
            f"{len(layer_projections)}: the loss terms attention and relations can't be computed for this family"
        )
    return layer_projections


def read_attention_widths(config: PretrainedConfig) -> tuple[int, int, int]:
    """Returns the widths of a layer's queries, keys and values.

    They differ with grouped-query attention and need not equal the hidden width; without attention they are 0.
    """
    heads = config.num_attention_heads
    if not heads:
        return 0, 0, 0
    width = getattr(config, "true_hidden_size", config.hidden_size)  # MobileBERT: the width inside its bottlenecks
    head_width = getattr(config, "head_dim", None) or width // heads
    key_value_heads = getattr(config, "num_key_value_heads", None) or heads
    return heads * head_width, key_value_heads * head_width, key_value_heads * head_width


@contextmanager
def capture_attention_vectors(model: PreTrainedModel) -> Iterator[list[AttentionVectors]]:
    """Yields a list that a forward pass within the context fills with each layer's queries, keys and values.

    These are the outputs of the projections: in families with rotary embeddings, the vectors before the rotation.

    Raises:
        InputError: As in `find_attention_projections`.
    """
    layers = find_attention_projections(model)
    captured: list[list[Tensor | None]] = [[None] * 3 for _ in layers]
    with ExitStack() as hooks:
        for outputs, projections in zip(captured, layers, strict=True):
            for i, projection in enumerate(projections):
                part = slice(None) if len(projections) == 1 else slice(i, i + 1)
                hooks.enter_context(projection.register_forward_hook(partial(_store_output, outputs, part)))
        yield cast(list[AttentionVectors], captured)


def _store_output(
    outputs: list[Tensor | None], part: slice, module: nn.Module, inputs: tuple[object, ...], output: Tensor
) -> None:
    outputs[part] = output.chunk(3, -1) if part == slice(None) else [output]
