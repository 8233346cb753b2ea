"""Sparsity that is introduced while a student trains, and preserved while it trains further."""

from typing import cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch.optim import Optimizer
from transformers import PreTrainedModel

from compress.sparsity.config import SparsityConfig
from compress.sparsity.layers import compute_zero_shares, find_sparsifiable_layers
from compress.sparsity.training import SparseState, SparseTraining, convert_sparse, prepare_sparse
from distill.train.module import DistillationModule
from pipelines.runs.manifest import JsonObject
from pipelines.settings.commands.distill import DistillConfig

SKIPPED_STEPS_VERSION = 2  # of how the schedule counts skipped steps; 1 left them out


class SparsityCallback(Callback):
    """Masks the student's weights according to the schedule.

    Args:
        config: Pattern and schedule.
        is_sparse: The student is sparse already; its zeros are preserved.
    """

    training: SparseTraining

    def __init__(self, config: SparsityConfig, *, is_sparse: bool = False):
        self.config, self.is_sparse = config, is_sparse
        self.state: JsonObject = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prepares the masks, or restores those of a resumed run."""
        student = cast(DistillationModule, pl_module).student
        steps = int(trainer.estimated_stepping_batches)
        masks = None
        if self.is_sparse:
            masks = {f"{name}.weight": layer.weight != 0 for name, layer in find_sparsifiable_layers(student).items()}
        self.training = prepare_sparse(student, self.config.build_schedule(steps), masks=masks)
        if self.state:
            self.training.load_state_dict(cast(SparseState, self.state))
        self.training.attach(trainer.optimizers[0])

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Updates the masks after the backward pass."""
        self.training.after_backward()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Counts a step that the optimizer didn't take, after a spike or an overflow, as a step of the schedule."""
        while self.training.step < trainer.global_step:
            self.training.skip_step(trainer.optimizers[0])

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Sets the masked weights to zero for good, unless the training was interrupted."""
        if not trainer.interrupted:
            convert_sparse(self.training)

    def state_dict(self) -> JsonObject:
        """Returns the masks and scores for the checkpoint."""
        return dict(self.training.state_dict())

    def load_state_dict(self, state_dict: JsonObject) -> None:
        """Stores what `state_dict` returned; `on_train_start` restores it."""
        self.state = state_dict


def sparsity_settings(config: DistillConfig, precision: str) -> JsonObject:
    """Returns the settings of sparsity that the student depends on, for stage keys; empty without sparsity."""
    if not config.sparsity.requested:
        return {}
    # Keys of trainings that skip no steps lack the version.
    skips_steps = config.train.recoveries or precision == "16-mixed"
    version = {"skipped_steps": SKIPPED_STEPS_VERSION} if skips_steps else {}
    return {"sparsity": vars(config.sparsity) | version}


def mean_zero_share(model: PreTrainedModel) -> float:
    """Returns the mean share of zeros in the weights of the layers that can be sparse."""
    shares = list(compute_zero_shares(model).values())
    return sum(shares) / len(shares)
