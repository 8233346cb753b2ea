"""The end of a training whose validation score no longer improves, and the return to its best weights."""

import shutil
from pathlib import Path
from typing import cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import nn

from distill.train.module import DistillationModule
from pipelines.runs.files import replace_folder
from pipelines.runs.manifest import JsonObject
from pipelines.runs.processes import World
from pipelines.runs.strategies.by_layout import find_strategy
from pipelines.runs.trainer_state import Metrics, read_validation_metrics
from pipelines.runs.training_checkpoint import load_weights, save_weights


class EarlyStop(Callback):
    """Saves the best-scoring weights on validation and stops after `patience` epochs without a better score."""

    def __init__(self, folder: Path, patience: int, world: World | None = None):
        self.folder, self.patience, self.world = folder, patience, world or World()
        self.best, self.waited = float("-inf"), 0
        self.metrics: Metrics = {}  # of the most recent validation
        self.best_metrics: Metrics = {}  # of the validation of the saved weights

    def state_dict(self) -> JsonObject:
        """Returns the best score, the number of epochs since, and the metrics of the last and the best validation."""
        return {"best": self.best, "waited": self.waited, "metrics": self.metrics, "best_metrics": self.best_metrics}

    def load_state_dict(self, state_dict: JsonObject) -> None:
        """Restores what `state_dict` returned."""
        self.best, self.waited = state_dict["best"], state_dict["waited"]
        self.metrics = state_dict.get("metrics", {})
        self.best_metrics = state_dict.get("best_metrics", {})

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stops a run that was killed between its last epoch and the end of the stage."""
        self._stop_if_due(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves the weights if they score better than all before, and otherwise counts the epoch."""
        self.metrics = read_validation_metrics(trainer)
        if not self.patience:
            return
        student, score = cast(DistillationModule, pl_module).student, float(trainer.callback_metrics["val/score"])
        if score > self.best:
            self.best, self.waited, self.best_metrics = score, 0, self.metrics
            with find_strategy(trainer).gather_weights(student):
                self._save(trainer, student)
        else:
            self.waited += 1
            self._stop_if_due(trainer)

    def restore(self, module: DistillationModule) -> Metrics:
        """Loads the best weights into the student, if any were saved; every process calls it.

        Returns:
            The metrics of the student's weights: of the best validation, or of the last one.
        """
        if not self.patience:
            return self.metrics
        self.world.share_files(self.folder)
        if not self.folder.exists():
            return self.metrics
        load_weights(self.folder, module.student)
        return self.best_metrics

    def _stop_if_due(self, trainer: Trainer) -> None:
        trainer.should_stop = trainer.should_stop or 0 < self.patience <= self.waited

    def _save(self, trainer: Trainer, student: nn.Module) -> None:
        """Writes the weights beside the old ones, then renames, so that a partial write never replaces the old."""
        partial = self.folder.with_suffix(".partial")
        if self.world.manages_files:
            shutil.rmtree(partial, ignore_errors=True)
        trainer.strategy.barrier()
        save_weights(partial, student)
        if self.world.manages_files:
            with replace_folder(self.folder) as fresh:
                fresh.rmdir()
                partial.replace(fresh)
        trainer.strategy.barrier()
