"""Inputs of layers while calibration batches run, seen by forward pre-hooks."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from compress.errors import CompressError
from distill.eval_mode import eval_mode

CalibrationBatch = Mapping[
    str, Tensor
]  # keyword arguments of a model, such as input_ids and attention_mask [batch, length]


class InputObserver:
    """Records which layers take the same tensor in succession; subclasses also read the inputs.

    `first_consumers` maps a layer to the first layer that took the same tensor; `mask` [batch, length] is the attention
    mask of the current batch, or None.
    """

    def __init__(self) -> None:
        self.mask: Tensor | None = None
        self.first_consumers: dict[str, str] = {}
        self._last: tuple[Tensor | None, str] = None, ""

    def observe(self, name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Is called with a layer's inputs before each of its forward passes."""
        if inputs[0] is not self._last[0]:
            self._last = inputs[0], name
        self.first_consumers.setdefault(name, self._last[1])

    @torch.no_grad()
    def run(self, model: nn.Module, layers: Mapping[str, nn.Module], batches: Iterable[CalibrationBatch]) -> int:
        """Runs the model on the batches, observes the layers' inputs, and returns the number of texts."""
        texts = 0
        hooks = [layer.register_forward_pre_hook(partial(self.observe, name)) for name, layer in layers.items()]
        try:
            for batch in batches:
                self.mask = batch["attention_mask"].bool() if "attention_mask" in batch else None
                model(**batch)
                texts += len(next(iter(batch.values())))
        finally:
            for hook in hooks:
                hook.remove()
        return texts


class InputSums(InputObserver):
    """Sums a function of each layer's inputs over all tokens; `sums` maps a layer's name to its sum.

    Args:
        compute: Returns the summand of the input rows [tokens, width] of a batch, without padding.
        share: Whether layers that take the same tensor share the sum of the first of them.
    """

    def __init__(self, compute: Callable[[Tensor], Tensor], *, share: bool = False):
        super().__init__()
        self.sums: dict[str, Tensor] = {}
        self._compute, self._share = compute, share

    def observe(self, name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Adds the summand of an input."""
        super().observe(name, module, inputs)
        if self._share and self.first_consumers[name] != name:
            return
        summand = self._compute(flatten_unpadded(inputs[0], self.mask))
        self.sums[name] = self.sums[name] + summand if name in self.sums else summand

    def get_sum(self, name: str) -> Tensor:
        """Returns the sum over the inputs of a layer."""
        return self.sums[self.first_consumers[name] if self._share else name]


def sum_layer_inputs(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
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
    with eval_mode(model):
        observer.run(model, layers, batches)
    missing = [name for name in layers if name not in observer.sums]
    if missing:
        raise CompressError(
            f"layer {missing[0]!r}: expected calibration batches that reach it, found none: its inputs are unknown"
        )
    return observer.sums


def find_shared_inputs(model: nn.Module, layers: Mapping[str, nn.Module], batch: CalibrationBatch) -> dict[str, str]:
    """Returns each layer that the model calls -> the first layer that took the same tensor in succession."""
    observer = InputObserver()
    observer.run(model, layers, [batch])
    return observer.first_consumers


def drop_padding(values: Tensor, mask: Tensor | None) -> Tensor:
    """Returns the values [tokens, ...] that aren't padding, or all if there is no token axis, as after pooling."""
    return values[mask] if mask is not None and values.shape[:-1] == mask.shape else values


def flatten_unpadded(values: Tensor, mask: Tensor | None) -> Tensor:
    """Returns inputs [..., width] of a layer as rows [tokens, width], without padding."""
    return drop_padding(values, mask).flatten(0, -2)
