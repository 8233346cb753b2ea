"""The Lightning Trainer of a stage: progress, logs, and checkpoints from which a run resumes bit-identically."""

import logging
import os
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger, Logger
from torch.distributed.device_mesh import DeviceMesh

from compress.measure.training_precision import MODES, as_stock, convert_for, optimizer_for
from distill.data.batches.data_module import RowsDataModule
from distill.errors import InputError
from distill.parallel.layout import Layout
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from pipelines.runs import stops
from pipelines.runs.checkpoint_schedule import Checkpoints
from pipelines.runs.console import Console
from pipelines.runs.processes import World
from pipelines.runs.stage import LOGS, SCRATCH, replacing
from pipelines.runs.strategies import strategy_of
from pipelines.runs.training_checkpoint import load_weights, save_weights
from pipelines.runs.watchdog import PositionRecorder
from pipelines.settings.distill_config import MachineConfig

ALONE = Layout()


def fit(
    module: DistillationModule,
    data: RowsDataModule,
    folder: Path,
    *,
    label: str,
    train: TrainConfig,
    machine: MachineConfig,
    precision: str,
    seed: int,
    console: Console,
    wandb_folder: Path,
    layout: Layout = ALONE,
    mesh: DeviceMesh | None = None,
    world: World | None = None,
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    """Trains `module`, resuming from the last checkpoint in `folder` if there is one; returns the last metrics.

    Every process of the run calls this with the student laid out on `mesh` according to `layout`. Changes that
    `callbacks` make after a batch are included in the checkpoint written after it.

    Raises:
        InputError: Lightning doesn't support the requested devices and precision here.
    """
    hush()
    world = world or World()
    if machine.threads:
        torch.set_num_threads(machine.threads)
    checkpoints = Checkpoints(folder / SCRATCH / "checkpoints", train.checkpoint_every, world)
    stopper = EarlyStop(folder / SCRATCH / "best", train.patience)
    progress = FitProgress(console, label, train)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    try:
        trainer = lightning.Trainer(
            accelerator=machine.accelerator,
            devices=here,
            num_nodes=layout.processes // here,
            strategy=strategy_of(layout, machine, mesh),
            precision=MODES[precision].trainer,
            max_epochs=train.epochs,
            accumulate_grad_batches=train.accumulate,
            gradient_clip_val=train.max_grad_norm or None,
            log_every_n_steps=min(machine.log_every, max(1, len(data.train_dataloader()) // 4)),
            callbacks=[StepSeed(seed), *callbacks, checkpoints, stopper, progress, PositionRecorder(world.everyone)],
            logger=loggers(folder, machine, label, wandb_folder) if world.is_rank_zero else False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
        )
    except (ValueError, RuntimeError, lightning.fabric.utilities.exceptions.MisconfigurationException) as error:
        raise InputError(f"machine: {error}") from error
    computes_as(precision, module)
    with progress, checkpoints:
        trainer.fit(module, datamodule=data, ckpt_path=checkpoints.latest(), weights_only=True)
    stops.check()
    trainer.strategy.release(module)  # type: ignore[attr-defined]
    stopper.restore(module)
    if not MODES[precision].stock:
        as_stock(module.student)
    return stopper.metrics


def validate(
    module: DistillationModule, data: RowsDataModule, *, machine: MachineConfig, precision: str
) -> dict[str, Any]:
    """Returns the validation metrics of a student without training it, on one process."""
    hush()
    trainer = lightning.Trainer(
        accelerator=machine.accelerator,
        devices=1,
        precision=MODES[precision].trainer,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.validate(module, datamodule=data, verbose=False)
    return last_metrics(trainer)


def last_metrics(trainer: Any) -> dict[str, Any]:
    return {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}


def computes_as(precision: str, module: DistillationModule) -> None:
    """Gives the module the layers, weights and optimizer of a mode of `compress.measure.training_precision`."""
    if MODES[precision].stock:
        return
    convert_for(precision, module.student)
    convert_for(precision, module.taught)
    module.make_optimizer = optimizer_for(precision)


def loggers(folder: Path, machine: MachineConfig, label: str, wandb_folder: Path) -> list[Logger]:
    """Returns the CSV logger and, if requested, the Weights & Biases logger.

    Each attempt has its own CSV file, so that a resumed run keeps the rows written before a kill.
    """
    attempts = len(list((folder / LOGS).glob("attempt-*")))
    chosen: list[Logger] = [CSVLogger(folder / LOGS, name="", version=f"attempt-{attempts}")]
    if machine.wandb != "off":
        from lightning.pytorch.loggers import WandbLogger

        os.environ.setdefault("WANDB_SILENT", "true")
        wandb_folder.mkdir(parents=True, exist_ok=True)
        chosen.append(
            WandbLogger(name=label, project="stillroom", save_dir=wandb_folder, offline=machine.wandb == "offline")
        )
    return chosen


def hush() -> None:
    """Silences Lightning's hints, which concern defaults that this module overrides on purpose."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # when one process saves a checkpoint


class StepSeed(Callback):
    """Seeds dropout for each batch.

    The random numbers depend on the batch's number and not on previous batches.
    """

    def __init__(self, seed: int):
        self.seed = seed

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        number = trainer.current_epoch * int(trainer.num_training_batches) + batch_idx
        data_rank, _ = trainer.datamodule.place()
        torch.manual_seed(((self.seed << 32) + number + (data_rank << 48)) % 2**63)


class EarlyStop(Callback):
    """Saves the best-scoring weights on validation and stops after `patience` epochs without a better score."""

    def __init__(self, folder: Path, patience: int):
        self.folder, self.patience = folder, patience
        self.best, self.waited = float("-inf"), 0
        self.metrics: dict[str, Any] = {}  # of the most recent validation

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited, "metrics": self.metrics}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.waited, self.metrics = state["best"], state["waited"], state.get("metrics", {})

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.stop(trainer)  # a resumed run may have been killed between its last epoch and the end of the stage

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.metrics = last_metrics(trainer)
        if not self.patience:
            return
        score = float(trainer.callback_metrics["val/score"])
        if score > self.best:
            self.best, self.waited = score, 0
            with trainer.strategy.whole(pl_module.student):
                self.save(trainer, pl_module.student)
        else:
            self.waited += 1
            self.stop(trainer)

    def stop(self, trainer: Any) -> None:
        trainer.should_stop = trainer.should_stop or 0 < self.patience <= self.waited

    def save(self, trainer: Any, student: Any) -> None:
        """Writes the weights beside the old ones, then renames, so that a partial write never replaces the old."""
        partial = self.folder.with_suffix(".partial")
        if trainer.is_global_zero:
            shutil.rmtree(partial, ignore_errors=True)
        trainer.strategy.barrier()
        save_weights(partial, student)
        if trainer.is_global_zero:
            with replacing(self.folder) as fresh:
                fresh.rmdir()
                partial.replace(fresh)
        trainer.strategy.barrier()

    def restore(self, module: DistillationModule) -> None:
        if self.patience and self.folder.exists():
            load_weights(self.folder, module.student)


class FitProgress(Callback):
    """Shows examples per second, remaining time, and the last loss and score."""

    def __init__(self, console: Console, label: str, train: TrainConfig):
        self.console, self.label, self.train = console, label, train
        self.shown: Any = None
        self.note = ""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *failure: Any) -> None:
        if self.shown is not None:
            self.shown.__exit__(*failure)
            self.shown = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.is_global_zero:
            return
        rows = len(trainer.datamodule.train)
        self.shown = self.console.track(self.label, rows * self.train.epochs)
        self.advance = self.shown.__enter__()
        # The loader's own count: Lightning's is one too low in a checkpoint written at the end of a batch.
        loader = trainer.datamodule.batches
        epochs, batches = divmod(loader.position, len(loader))
        if epochs or batches:
            self.advance(min(epochs * rows + batches * self.train.batch_size, rows * self.train.epochs), resumed=True)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.shown is None:
            return
        self.advance(batch.get("batch_rows", len(batch["labels"])), f"loss {outputs['loss'].item():.3f} {self.note}")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if "val/score" in trainer.callback_metrics and trainer.is_global_zero:
            self.note = f"validation {trainer.callback_metrics['val/score'].item():.4f}"
            self.console.say(f"  {self.label}: epoch {trainer.current_epoch + 1}/{trainer.max_epochs}, {self.note}")
