"""Sparsity that is introduced while a student trains, and preserved while it trains further."""

from typing import Any

from lightning.pytorch.callbacks import Callback

from compress.sparsity.layers import sparse_layers, zero_share
from compress.sparsity.recipe import SparseConfig
from compress.sparsity.training import SparseTraining, convert, prepare


class SparsityCallback(Callback):
    """Masks the student's weights according to the schedule.

    Args:
        config: Pattern and schedule.
        held: The student is sparse already; its zeros are preserved.
    """

    training: SparseTraining

    def __init__(self, config: SparseConfig, *, held: bool = False):
        self.config, self.held = config, held
        self.state: dict[str, Any] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        student, steps = pl_module.student, int(trainer.estimated_stepping_batches)
        masks = None
        if self.held:
            masks = {f"{name}.weight": layer.weight != 0 for name, layer in sparse_layers(student).items()}
        self.training = prepare(student, self.config.schedule(steps), masks=masks)
        if self.state:
            self.training.load_state_dict(self.state)
        self.training.attach(trainer.optimizers[0])

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.training.after_backward()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.interrupted:
            convert(self.training)

    def state_dict(self) -> dict[str, Any]:
        return self.training.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def share_of_zeros(model: Any) -> float:
    """Returns the mean share of zeros in the weights of the layers that can be sparse."""
    shares = list(zero_share(model).values())
    return sum(shares) / len(shares)
