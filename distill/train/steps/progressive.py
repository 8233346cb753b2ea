"""Progressive knowledge transfer: student layers are trained one after another, on the outputs of those below."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from transformers import PreTrainedModel

from distill.errors import InputError
from distill.losses.config import LayerPairs
from distill.parallel.tensor_plan import layer_names


class LayerReached(Exception):  # noqa: N818, no error
    """Signals that a forward pass can end early."""


@contextmanager
def ending_after(model: PreTrainedModel, layer: int) -> Iterator[list[Tensor]]:
    """Ends a forward pass within the context after the given layer, counted from 1.

    Yields a list, which the pass fills with the first layer's input and each layer's output [batch, length, width].
    """
    layers = [model.get_submodule(name) for name in layer_names(model)[: model.config.num_hidden_layers]]
    states: list[Tensor] = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states.append(args[0] if args else kwargs["hidden_states"])

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        states.append(output[0] if isinstance(output, tuple) else output)
        if len(states) > layer:
            raise LayerReached

    with ExitStack() as hooks:
        hooks.enter_context(layers[0].register_forward_pre_hook(enter, with_kwargs=True))
        for each in layers[:layer]:
            hooks.enter_context(each.register_forward_hook(leave))
        with suppress(LayerReached):
            yield states


def check_turns(lessons: LayerPairs, layers: int) -> None:
    """Checks that each of the student's `layers` layers has a teacher layer to be trained on.

    Raises:
        InputError: The layer map has no pair for a layer of the student.
    """
    # The embeddings are trained with the first layer.
    taught = {"hidden": {s or 1 for s, _ in lessons.hidden}, "attention": {s + 1 for s, _ in lessons.attention}}
    for name, own in taught.items():
        left = sorted({*range(1, layers + 1)} - own)
        if own and left:
            raise InputError(
                f"general.progressive: expected a loss.layer_map with a pair for each of the student's {layers} "
                f"layers, found none for {', '.join(map(str, left))}: loss.{name} would teach nothing in their turn"
            )


class LayerByLayer(Callback):
    """Callback that trains the student's layers one at a time during the first `share` of the steps, then all of it.

    The embeddings are trained with the first layer. While one layer is trained, all others are frozen, and the layers
    above it are not computed.

    Source: Sun et al. 2020, MobileBERT (arXiv 2004.02984), section 3.4, progressive knowledge transfer: the same number
    of steps for each layer, then the heads. There the layers below are trained further at a small rate or frozen; here
    they are frozen.
    """

    def __init__(self, share: float):
        if not 0 < share <= 1:
            raise InputError(f"progressive: expected a share of the steps above 0 and up to 1, found {share}")
        self.share = share
        self.learning: list[nn.Parameter] = []

    def turn(self, step: int, steps: int, layers: int) -> int:
        """Returns the layer that is trained in a step, counted from 1; 0 for all layers."""
        mine = int(steps * self.share)
        return min(layers, step * layers // max(1, mine) + 1) if step < mine else 0

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        check_turns(pl_module.taught.lessons, pl_module.student.config.num_hidden_layers)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        student = pl_module.student
        turn = self.turn(trainer.global_step, pl_module.steps, student.config.num_hidden_layers)
        if turn != pl_module.taught.turn or not self.learning:
            pl_module.taught.turn = turn
            self.open(pl_module, turn)

    def open(self, module: Any, turn: int) -> None:
        """Unfreezes the weights that are trained in this turn and freezes all others."""
        self.learning = self.learning or [each for each in module.parameters() if each.requires_grad]
        student: PreTrainedModel = module.student
        allowed = {id(each) for each in self.learning}
        if turn:
            names = layer_names(student)[: student.config.num_hidden_layers]
            layers = [student.get_submodule(name) for name in names]
            own = list(layers[turn - 1].parameters())
            if turn == 1:
                above = {id(p) for layer in layers for p in layer.parameters()}
                own += [p for p in student.base_model.parameters() if id(p) not in above]
            own += list(module.taught.parameters())
            allowed &= {id(each) for each in own}
        for each in self.learning:
            each.requires_grad_(id(each) in allowed)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.taught.turn = 0
        for each in self.learning:
            each.requires_grad_(True)
