"""Selection of the linear layers to make sparse, and statistics of their inputs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from compress.errors import CompressError

Chosen = Callable[[str, nn.Linear], bool]
Batch = Mapping[str, Any]


def sparse_layers(model: nn.Module, chosen: Chosen | None = None) -> dict[str, nn.Linear]:
    """Returns name -> linear layer for which `chosen(name, layer)` is true; by default all in the model's layer lists.

    Layer lists are `nn.ModuleList`s, so embeddings, pooler and classifier stay dense.

    Raises:
        CompressError: No layer matches, or a weight is sharded across processes.
    """
    lists = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
    take = chosen or (lambda name, layer: name.startswith(lists))
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    found = {name: layer for name, layer in linear.items() if take(name, layer)}
    if not found:
        raise CompressError(
            f"{type(model).__name__}: expected linear layers to make sparse, found none among {len(linear)}; "
            "take some with `chosen`, or nothing would become sparse"
        )
    for name, layer in found.items():
        if isinstance(layer.weight, DTensor):
            raise CompressError(
                f"weight '{name}.weight': expected it whole, found a part: scores would see a part only"
            )
    return found


def zero_share(model: nn.Module, chosen: Chosen | None = None) -> dict[str, float]:
    """Returns the name of each layer's weight -> its share of exact zeros."""
    layers = sparse_layers(model, chosen)
    return {f"{name}.weight": (layer.weight == 0).double().mean().item() for name, layer in layers.items()}


def sum_over_inputs(
    model: nn.Module,
    layers: Mapping[str, nn.Linear],
    batches: Iterable[Batch],
    of: Callable[[Tensor], Tensor],
) -> dict[str, Tensor]:
    """Runs the model on all batches and returns the sum of `of(inputs [tokens, width], float64)` for each layer.

    Args:
        batches: Keyword arguments of the model; tokens masked out by their `attention_mask` aren't counted.

    Raises:
        CompressError: No batch reaches one of the layers.
    """
    sums: dict[str, Tensor] = {}
    real: dict[str, Tensor | None] = {"mask": None}

    def hook_of(name: str) -> Callable:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            value = of(tokens_of(inputs[0], real["mask"]).double())
            sums[name] = sums[name] + value if name in sums else value

        return hook

    handles = [layer.register_forward_pre_hook(hook_of(name)) for name, layer in layers.items()]
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad():
            for batch in batches:
                real["mask"] = batch.get("attention_mask")
                model(**batch)
    finally:
        restore(modes, handles)
    missing = [name for name in layers if name not in sums]
    if missing:
        raise CompressError(f"layer {missing[0]!r}: no calibration batch reached it: its inputs are unknown")
    return sums


def tokens_of(inputs: Tensor, mask: Tensor | None) -> Tensor:
    """Returns rows [tokens, width] of a layer's input, without padding if the mask's shape [batch, length] matches."""
    if mask is not None and inputs.shape[:-1] == mask.shape:
        return inputs[mask.bool()]
    return inputs.flatten(0, -2)


def restore(modes: Sequence[tuple[nn.Module, bool]], handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()
    for module, training in modes:
        module.training = training
