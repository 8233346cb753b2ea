"""Activation checkpointing: activations of layers are computed again in the backward pass instead of kept.

The numbers are those of the plain step: dropout draws the same masks, and losses and gradients are equal.

Source: Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost (arXiv 1604.06174), with a segment for each
layer; which products `selective` keeps follows their FLOPs per byte, as in Korthikanti et al. 2022 (arXiv 2205.05198).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import PreTrainedModel

from distill.checkpoint.layers import find_layer_names
from distill.errors import InputError
from distill.train.config import AUTO, EVERY

NONE, FULL, SELECTIVE = "none", "full", "selective"

_Contexts: TypeAlias = tuple[AbstractContextManager[None], AbstractContextManager[None]]  # of forward and recomputation

aten = torch.ops.aten
_LINEAR = (aten.mm.default, aten.addmm.default)
_BATCHED = (aten.bmm.default, aten.baddbmm.default)
_FUSED_ATTENTION = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)


@contextmanager
def checkpoint_layers(model: PreTrainedModel, mode: str) -> Iterator[None]:
    """Makes layers compute their activations again in backward passes of forward passes within the context.

    Args:
        model: Its layers are those of `find_layer_names`, on any layout. Weights, names and hooks stay as they are.
        mode: `full`, each layer keeps its input only; `every=K`, every K-th layer does so; `selective`, each layer
            keeps its input and the results of its costly products (see `KeepCostlyProducts`); `none`.

    Raises:
        InputError: The model has no list of layers, or the mode is `auto`, which a run chooses.
    """
    if mode == AUTO:
        raise InputError("train.checkpointing: expected none, full, selective or every=K, found auto: only runs choose")
    with ExitStack() as changed:
        for number, name in enumerate(find_layer_names(model) if mode != NONE else []):
            if number % _find_interval(mode) == 0:
                changed.enter_context(_checkpoint_layer(model.get_submodule(name), mode))
        yield


def _find_interval(mode: str) -> int:
    match = EVERY.fullmatch(mode)
    return int(match[1]) if match else 1


@contextmanager
def _checkpoint_layer(layer: nn.Module, mode: str) -> Iterator[None]:
    """Replaces `forward` of the layer itself, so that its hooks run once and not again in the recomputation."""
    previous = layer.__dict__.get("forward")
    layer.forward = _CheckpointedForward(layer, previous, mode)
    try:
        yield
    finally:
        del layer.forward
        if previous is not None:
            layer.forward = previous


class _CheckpointedForward:
    """The layer's `forward` under activation checkpointing; a copy of the model calls the copy's layer."""

    def __init__(self, layer: nn.Module, previous: Callable[..., Any] | None, mode: str):
        self.layer, self.previous, self.mode = layer, previous, mode

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.previous or self._call_layer
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        settings: dict[str, Any] = {"context_fn": _keep_costly_products} if self.mode == SELECTIVE else {}
        return checkpoint(forward, *args, use_reentrant=False, **settings, **kwargs)

    def _call_layer(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.layer).forward(self.layer, *args, **kwargs)


def _keep_costly_products() -> _Contexts:
    contexts: _Contexts = create_selective_checkpoint_contexts(KeepCostlyProducts())
    return contexts


class KeepCostlyProducts:
    """Policy for one pass through a layer: what attention returns and the products after it are kept.

    Not kept are queries, keys and values (a quarter of a layer's FLOPs for a third of the bytes of its products), the
    scores of attention, and products narrower than their input, such as a layer's last, which no gradient needs.
    """

    def __init__(self) -> None:
        self.after_attention = {False: False, True: False}  # of the forward pass and of the recomputation

    def __call__(
        self, context: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        """Returns whether the result of an operator is kept."""
        is_kept = False
        if operator in _LINEAR:
            inputs, weight = args[-2:]
            is_kept = self.after_attention[context.is_recompute] and _width(weight) >= _width(inputs)
        elif operator in _BATCHED:
            self.after_attention[context.is_recompute] = True
            left, right = args[-2:]
            is_kept = _width(left) >= _width(right)
        elif operator in _FUSED_ATTENTION:
            self.after_attention[context.is_recompute] = True
            is_kept = True
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _width(matrix: Tensor) -> int:
    return matrix.shape[-1]
