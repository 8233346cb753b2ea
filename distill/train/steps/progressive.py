"""Layers that learn one after another: each from the teacher's, on what the trained ones below it give."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from transformers import PreTrainedModel

from distill.errors import InputError
from distill.losses.config import Lessons
from distill.parallel.tensor_plan import layer_names


class LayerReached(Exception):  # noqa: N818, no error
    """Ends a forward pass where nothing more is needed."""


@contextmanager
def ending_after(model: PreTrainedModel, layer: int) -> Iterator[list[Tensor]]:
    """A forward pass inside ends when the layer, counted from 1, is done; what went into the first layer and what came
    out of each [batch, length, width] is in the list then.
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


def check_turns(lessons: Lessons, layers: int) -> None:
    """
    Raises:
        InputError: A layer of the student, of so many, that has nothing to learn from in its turn.
    """
    # The embeddings learn with the first layer.
    taught = {"hidden": {s or 1 for s, _ in lessons.hidden}, "attention": {s + 1 for s, _ in lessons.attention}}
    for name, own in taught.items():
        left = sorted({*range(1, layers + 1)} - own)
        if own and left:
            raise InputError(
                f"general.progressive: expected a loss.layer_map with a pair for each of the student's {layers} "
                f"layers, found none for {', '.join(map(str, left))}: loss.{name} would teach nothing in their turn"
            )


class LayerByLayer(Callback):
    """For the first `share` of a training's steps the student's layers learn in turn, the first one with the
    embeddings; all but the one whose turn it is are left as they are, and those above it are not computed. Then the
    whole student learns.

    Source: Sun et al. 2020, MobileBERT (arXiv 2004.02984), section 3.4, progressive knowledge transfer: as many steps
    for each layer, then the heads. There the layers below learn on at a small rate or not at all; here not at all.
    """

    def __init__(self, share: float):
        if not 0 < share <= 1:
            raise InputError(f"progressive: expected a share of the steps above 0 and up to 1, found {share}")
        self.share = share
        self.learning: list[nn.Parameter] = []

    def turn(self, step: int, steps: int, layers: int) -> int:
        """The layer, from 1, that learns in a step; 0 for all of them."""
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
        """Weights that learn in this turn, and no others."""
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
