"""Progressive knowledge transfer: student layers are trained one after another, on the outputs of those below."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Protocol, cast

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from transformers import PreTrainedModel

from distill.checkpoint.layers import find_layer_names
from distill.errors import InputError
from distill.losses.config import LayerPairs


class _LayerReached(Exception):  # noqa: N818, it ends a forward pass and reports no error
    """Signals that a forward pass can end early."""


@contextmanager
def stop_after_layer(model: PreTrainedModel, layer: int) -> Iterator[list[Tensor]]:
    """Ends a forward pass within the context after `layer`, counted from 1.

    Yields a list, which the pass fills with the first layer's input and each layer's output [batch, length, width].
    """
    layers = [model.get_submodule(name) for name in find_layer_names(model)[: model.config.num_hidden_layers]]
    states: list[Tensor] = []

    def store_input(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        states.append(args[0] if args else kwargs["hidden_states"])

    def store_output(module: nn.Module, args: tuple[Tensor, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        states.append(output[0] if isinstance(output, tuple) else output)
        if len(states) > layer:
            raise _LayerReached

    with ExitStack() as hooks:
        hooks.enter_context(layers[0].register_forward_pre_hook(store_input, with_kwargs=True))
        for each in layers[:layer]:
            hooks.enter_context(each.register_forward_hook(store_output))
        with suppress(_LayerReached):
            yield states


def check_layer_coverage(pairs: LayerPairs, layers: int) -> None:
    """Checks that each of the student's `layers` layers has a teacher layer to be trained on.

    Raises:
        InputError: The layer map has no pair for a layer of the student.
    """
    # The embeddings are trained with the first layer.
    trained = {"hidden": {s or 1 for s, _ in pairs.hidden}, "attention": {s + 1 for s, _ in pairs.attention}}
    for name, covered in trained.items():
        missing = sorted({*range(1, layers + 1)} - covered)
        if covered and missing:
            raise InputError(
                f"general.progressive_share: expected a loss.layer_map with a pair for each of the student's {layers} "
                f"layers, found none for {', '.join(map(str, missing))}: loss.{name} would not train them"
            )


class _LayerTerms(Protocol):
    layer_pairs: LayerPairs
    active_layer: int

    def parameters(self) -> Iterator[nn.Parameter]: ...


class _LayerwiseModule(Protocol):
    """The part of a `DistillationModule` that the callback uses."""

    student: PreTrainedModel
    layer_terms: _LayerTerms
    total_steps: int

    def parameters(self) -> Iterator[nn.Parameter]: ...


class LayerByLayer(Callback):
    """Callback that trains the student's layers one at a time during the first `share` of the steps, then all of it.

    The embeddings are trained with the first layer. While one layer is trained, all others are frozen, and the layers
    above it are not computed.

    Source: Sun et al. 2020, MobileBERT (arXiv 2004.02984), section 3.4, progressive knowledge transfer: the same number
    of steps for each layer, then the heads. There the layers below are trained further at a small rate or frozen; here
    they are frozen.

    Args:
        share: Share of the steps, above 0 and up to 1.

    Raises:
        InputError: The share is out of range.
    """

    def __init__(self, share: float):
        if not 0 < share <= 1:
            raise InputError(f"progressive: expected a share of the steps above 0 and up to 1, found {share}")
        self.share = share
        self.trainable: list[nn.Parameter] = []  # all parameters that are trained at some time

    def find_active_layer(self, step: int, steps: int, layers: int) -> int:
        """Returns the layer that is trained in a step, counted from 1; 0 for all layers."""
        layerwise_steps = int(steps * self.share)
        return min(layers, step * layers // max(1, layerwise_steps) + 1) if step < layerwise_steps else 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Checks that the layer map trains every layer."""
        module = cast(_LayerwiseModule, pl_module)
        check_layer_coverage(module.layer_terms.layer_pairs, module.student.config.num_hidden_layers)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        """Selects the layer that the step trains."""
        module = cast(_LayerwiseModule, pl_module)
        layers = module.student.config.num_hidden_layers
        active_layer = self.find_active_layer(trainer.global_step, module.total_steps, layers)
        if active_layer != module.layer_terms.active_layer or not self.trainable:
            module.layer_terms.active_layer = active_layer
            self._unfreeze(module, active_layer)

    def _unfreeze(self, module: _LayerwiseModule, active_layer: int) -> None:
        """Unfreezes the weights that are trained with the active layer and freezes all others."""
        self.trainable = self.trainable or [each for each in module.parameters() if each.requires_grad]
        student = module.student
        active = {id(each) for each in self.trainable}
        if active_layer:
            names = find_layer_names(student)[: student.config.num_hidden_layers]
            layers = [student.get_submodule(name) for name in names]
            parameters = list(layers[active_layer - 1].parameters())
            if active_layer == 1:
                in_layers = {id(p) for layer in layers for p in layer.parameters()}
                parameters += [p for p in student.base_model.parameters() if id(p) not in in_layers]
            parameters += list(module.layer_terms.parameters())
            active &= {id(each) for each in parameters}
        for each in self.trainable:
            each.requires_grad_(id(each) in active)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Unfreezes all layers."""
        self._unfreeze_all(cast(_LayerwiseModule, pl_module))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Unfreezes all layers: after a spike, the next fit's optimizer has to get the parameters of all of them."""
        self._unfreeze_all(cast(_LayerwiseModule, pl_module))

    def _unfreeze_all(self, module: _LayerwiseModule) -> None:
        module.layer_terms.active_layer = 0
        for each in self.trainable:
            each.requires_grad_(True)
