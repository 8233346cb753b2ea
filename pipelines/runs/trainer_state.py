"""What is read of Lightning's trainer: its data module, and the metrics of the last validation."""

from typing import TypeAlias, cast

from lightning.pytorch import Trainer

from distill.data.batches.data_module import RowsDataModule

Metrics: TypeAlias = dict[str, float]  # metric -> value, such as `val/score`


def read_validation_metrics(trainer: Trainer) -> Metrics:
    """Returns the metrics of the last validation."""
    return {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}


def find_data_module(trainer: Trainer) -> RowsDataModule:
    """Returns the data module that the trainer was called with."""
    return cast(RowsDataModule, trainer.datamodule)  # type: ignore[attr-defined]  # Lightning sets it in fit
