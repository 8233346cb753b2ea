"""Selection of the linear layers to make sparse."""

from collections.abc import Callable

from torch import nn
from torch.distributed.tensor import DTensor

from compress.errors import CompressError

LayerFilter = Callable[[str, nn.Linear], bool]  # (name, layer) -> whether it is made sparse


def find_sparsifiable_layers(model: nn.Module, select: LayerFilter | None = None) -> dict[str, nn.Linear]:
    """Returns name -> linear layer for which `select(name, layer)` is true; by default all in the model's layer lists.

    Layer lists are `nn.ModuleList`s, so embeddings, pooler and classifier stay dense.

    Raises:
        CompressError: No layer matches, or a weight is sharded across processes.
    """
    lists = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
    select = select or (lambda name, layer: name.startswith(lists))
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    selected = {name: layer for name, layer in linears.items() if select(name, layer)}
    if not selected:
        raise CompressError(
            f"{type(model).__name__}: expected linear layers to make sparse, found none among {len(linears)}: no "
            "weight would become zero; choose layers with `select`"
        )
    for name, layer in selected.items():
        if isinstance(layer.weight, DTensor):
            raise CompressError(
                f"weight '{name}.weight': expected an unsharded weight, found a shard of it: scores would cover a part "
                "of it only"
            )
    return selected


def compute_zero_shares(model: nn.Module, select: LayerFilter | None = None) -> dict[str, float]:
    """Returns the name of each layer's weight -> its share of exact zeros.

    Raises:
        CompressError: No layer matches, or a weight is sharded across processes.
    """
    layers = find_sparsifiable_layers(model, select)
    return {f"{name}.weight": (layer.weight == 0).double().mean().item() for name, layer in layers.items()}
