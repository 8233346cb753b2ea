"""Selection of the linear layers to make sparse, and statistics of their inputs."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from compress.errors import CompressError
from compress.quantize.observers import CalibrationBatch, InputSums

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


def sum_layer_inputs(
    model: nn.Module,
    layers: Mapping[str, nn.Linear],
    batches: Iterable[CalibrationBatch],
    compute: Callable[[Tensor], Tensor],
) -> dict[str, Tensor]:
    """Runs the model on all batches and returns the sum of `compute(inputs)` for each layer.

    Args:
        model: The model; it is in eval mode meanwhile.
        layers: Layers of the model by name.
        batches: Keyword arguments of the model; tokens masked out by their `attention_mask` aren't counted.
        compute: Returns the summand of inputs [tokens, width], float64.

    Raises:
        CompressError: No batch reaches one of the layers.
    """
    observer = InputSums(lambda rows: compute(rows.double()))
    with _eval_mode(model):
        observer.run(model, layers, batches)
    missing = [name for name in layers if name not in observer.sums]
    if missing:
        raise CompressError(
            f"layer {missing[0]!r}: expected calibration batches that reach it, found none: its inputs are unknown"
        )
    return observer.sums


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Puts the model in eval mode inside the block; every module's own mode is restored after it."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training
