"""The progress of a training on the console."""

from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from pipelines.runs.console import Advance, Console
from pipelines.runs.trainer_state import find_data_module


class FitProgress(Callback):
    """Shows examples per second, remaining time, and the last loss and score."""

    def __init__(self, console: Console, label: str, train: TrainConfig):
        self.console, self.label, self.train = console, label, train
        self.note = ""
        self._advance: Advance | None = None
        self._open = ExitStack()

    def __enter__(self) -> None:
        """Does nothing; the progress is shown from the start of training on."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the progress, also after an error."""
        self._advance = None
        self._open.__exit__(kind, error, trace)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Shows the progress, with the rows of a resumed run counted as finished."""
        if not trainer.is_global_zero:
            return
        data = find_data_module(trainer)
        rows = data.epoch_rows
        advance = self._open.enter_context(self.console.track(self.label, rows * self.train.epochs))
        self._advance = advance
        # The loader's own count: Lightning's is one too low in a checkpoint written at the end of a batch.
        loader = data.batches
        epochs, batches = divmod(loader.position, len(loader)) if loader is not None else (0, 0)
        if epochs or batches:
            advance(min(epochs * rows + batches * self.train.rows, rows * self.train.epochs), resumed=True)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Tensor | Mapping[str, object] | None,
        batch: Mapping[str, Tensor],
        batch_idx: int,
    ) -> None:
        """Adds the rows of the batch and shows its loss."""
        if self._advance is None:
            return
        is_skipped = cast(DistillationModule, pl_module).spikes.is_skipping
        loss = "of a skipped batch" if is_skipped else f"{cast(Mapping[str, Tensor], outputs)['loss'].item():.3f}"
        rows = batch.get("batch_rows", len(batch["labels"]))
        self._advance(cast(int, rows), f"loss {loss} {self.note}")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prints the epoch's validation score."""
        if "val/score" in trainer.callback_metrics and trainer.is_global_zero:
            self.note = f"validation {trainer.callback_metrics['val/score'].item():.4f}"
            self.console.say(f"  {self.label}: epoch {trainer.current_epoch + 1}/{trainer.max_epochs}, {self.note}")
