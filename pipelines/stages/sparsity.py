"""Sparsity that is introduced while a student trains, and preserved while it trains further."""

from typing import Any, cast

from lightning.pytorch.callbacks import Callback

from compress.sparsity.config import SparsityConfig
from compress.sparsity.layers import compute_zero_shares, find_sparsifiable_layers
from compress.sparsity.training import SparseState, SparseTraining, convert, prepare


class SparsityCallback(Callback):
    """Masks the student's weights according to the schedule.

    Args:
        config: Pattern and schedule.
        held: The student is sparse already; its zeros are preserved.
    """

    training: SparseTraining

    def __init__(self, config: SparsityConfig, *, held: bool = False):
        self.config, self.held = config, held
        self.state: dict[str, Any] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        student, steps = pl_module.student, int(trainer.estimated_stepping_batches)
        masks = None
        if self.held:
            masks = {f"{name}.weight": layer.weight != 0 for name, layer in find_sparsifiable_layers(student).items()}
        self.training = prepare(student, self.config.build_schedule(steps), masks=masks)
        if self.state:
            self.training.load_state_dict(cast(SparseState, self.state))
        self.training.attach(trainer.optimizers[0])

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.training.after_backward()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.interrupted:
            convert(self.training)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.training.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def share_of_zeros(model: Any) -> float:
    """Returns the mean share of zeros in the weights of the layers that can be sparse."""
    shares = list(compute_zero_shares(model).values())
    return sum(shares) / len(shares)
