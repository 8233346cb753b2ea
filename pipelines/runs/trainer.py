"""The Lightning Trainer of a stage: progress, logs, and checkpoints from which a run resumes bit-identically."""

import gc
import logging
import os
import shutil
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias, cast

import lightning
import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger, Logger
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from compress.measure.precision_modes import (
    MODES,
    convert_to_mode,
    restore_stock_layers,
)
from distill.data.batches.data_module import RowsDataModule
from distill.errors import InputError
from distill.parallel.layout import Layout
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from distill.train.spikes import LossSpikeError
from pipelines.runs import stops
from pipelines.runs.checkpoint_schedule import CheckpointWriter
from pipelines.runs.console import Advance, Console
from pipelines.runs.failure_reports import PositionRecorder
from pipelines.runs.files import recover_folder, replace_folder
from pipelines.runs.loss_scaling import LossScaling
from pipelines.runs.manifest import LOGS, SCRATCH, JsonObject
from pipelines.runs.memory.plan import fit_into_memory
from pipelines.runs.processes import World
from pipelines.runs.range_test import find_rate
from pipelines.runs.rank_meter import build_meter
from pipelines.runs.recovery import Recovery
from pipelines.runs.strategies.by_layout import build_strategy, choose_device, find_strategy
from pipelines.runs.training_checkpoint import load_weights, save_weights
from pipelines.runs.training_logs import TrainingLogs
from pipelines.settings.commands.distill import MachineConfig

SINGLE_PROCESS = Layout()
_COLLECTED_FROM = 16 << 20  # bytes of weights; for smaller models, garbage collection takes longer than it helps
Metrics: TypeAlias = dict[str, float]  # metric -> value, such as `val/score`


def fit_module(
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
    layout: Layout = SINGLE_PROCESS,
    mesh: DeviceMesh | None = None,
    world: World | None = None,
    callbacks: Sequence[Callback] = (),
) -> Metrics:
    """Trains `module`, resuming from the last checkpoint in `folder` if there is one; returns the last metrics.

    Every process of the run calls this with the student laid out on `mesh` according to `layout`. Changes that
    `callbacks` make after a batch are included in the checkpoint written after it.

    Raises:
        InputError: Lightning doesn't support the requested devices and precision here.
    """
    silence_lightning()
    free_earlier_trainings(module)
    world = world or World()
    if machine.threads:
        torch.set_num_threads(machine.threads)
    scratch = module.scratch = folder / SCRATCH
    logs = TrainingLogs(folder / LOGS)
    recovery = Recovery(logs.spikes, scratch / "checkpoints", train.recoveries, world)
    checkpoints = CheckpointWriter(recovery.checkpoints, train.checkpoint_every, world, from_start=recovery.limit > 0)
    stopper = EarlyStop(scratch / "best", train.patience, world)
    if world.manages_files:
        recover_folder(stopper.folder)
    progress = FitProgress(console, label, train)
    positions = PositionRecorder(world.everyone)
    meter = build_meter(machine.rank_speeds, data, layout, logs)
    convert_precision(precision, module)
    fit_into_memory(module, data, machine, folder / LOGS, label, console, world, layout.data_parallel, precision)
    range_metrics: Metrics = {}
    if train.schedule == "find":
        module.train_config = find_rate(module, data, logs.range_test, seed, precision)
        range_metrics = {"found/learning_rate": module.train_config.peak_rate}
        console.say(f"  {label}: the range test found a learning rate of {module.train_config.peak_rate:.2g}")
    while True:
        trainer = build_trainer(
            train=train,
            machine=machine,
            precision=precision,
            layout=layout,
            mesh=mesh,
            log_every=min(machine.log_every, max(1, len(data.train_dataloader()) // 4)),
            callbacks=[StepSeed(seed), *callbacks, *meter, checkpoints, stopper, progress, positions],
            logger=build_loggers(folder, machine, label, wandb_folder) if world.is_rank_zero else False,
        )
        recovery.prepare(module)
        try:
            with progress, checkpoints:
                trainer.fit(module, datamodule=data, ckpt_path=checkpoints.find_latest(), weights_only=True)
            break
        except LossSpikeError as error:
            recovery.record(error, console, label)
    stops.raise_if_requested()
    console.say(f"  {label}: {data.wait_share:.1%} of the time was spent waiting for data")
    if world.is_rank_zero:
        logs.write_falls(module.rate_control.falls)
    find_strategy(trainer).restore_weights(module)
    stopper.restore(module)
    if not MODES[precision].is_stock:
        restore_stock_layers(module.student)
    return stopper.metrics | range_metrics


def free_earlier_trainings(module: DistillationModule) -> None:
    """Frees what earlier trainings of this process held, before one that needs memory.

    Lightning's objects refer to each other, so Python would free models and optimizer states of an earlier training
    late: in the middle of this one.
    """
    if sum(parameter.nbytes for parameter in module.parameters()) >= _COLLECTED_FROM:
        gc.collect()


def build_trainer(
    *,
    train: TrainConfig,
    machine: MachineConfig,
    precision: str,
    layout: Layout,
    mesh: DeviceMesh | None,
    log_every: int,
    callbacks: list[Callback],
    logger: list[Logger] | bool,
) -> Trainer:
    """Returns the Lightning trainer of a stage.

    Raises:
        InputError: Lightning doesn't support the requested devices and precision here.
    """
    local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    try:
        return Trainer(
            accelerator=machine.accelerator,
            devices=local_processes,
            num_nodes=layout.processes // local_processes,
            strategy=build_strategy(layout, machine, mesh),
            **precision_arguments(precision, machine),
            max_epochs=train.epochs,
            accumulate_grad_batches=train.accumulate,
            gradient_clip_val=train.max_grad_norm or None,
            log_every_n_steps=log_every,
            callbacks=callbacks,
            logger=logger,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
        )
    except (ValueError, RuntimeError, lightning.fabric.utilities.exceptions.MisconfigurationException) as error:
        raise InputError(f"machine: {error}") from error


def precision_arguments(precision: str, machine: MachineConfig) -> dict[str, Any]:
    """Returns the arguments of Lightning's trainer for a mode; DeepSpeed scales the loss itself."""
    if precision == "16-mixed" and not machine.deepspeed:
        return {"plugins": [LossScaling(choose_device(machine.accelerator).type)]}
    return {"precision": MODES[precision].trainer_precision}


def validate_module(
    module: DistillationModule, data: RowsDataModule, *, machine: MachineConfig, precision: str
) -> Metrics:
    """Returns the validation metrics of a student without training it, on one process."""
    silence_lightning()
    trainer = Trainer(
        accelerator=machine.accelerator,
        devices=1,
        precision=MODES[precision].trainer_precision,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.validate(module, datamodule=data, verbose=False)
    return read_validation_metrics(trainer)


def read_validation_metrics(trainer: Trainer) -> Metrics:
    """Returns the metrics of the last validation."""
    return {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}


def convert_precision(precision: str, module: DistillationModule) -> None:
    """Gives the module the layers, weights and rounding of a mode of `compress.measure.precision_modes`."""
    if MODES[precision].is_stock:
        return
    convert_to_mode(precision, module.student)
    convert_to_mode(precision, module.layer_terms)
    module.stochastic_rounding = MODES[precision].stochastic_rounding


def build_loggers(folder: Path, machine: MachineConfig, label: str, wandb_folder: Path) -> list[Logger]:
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


def silence_lightning() -> None:
    """Silences Lightning's hints, which concern defaults that this module overrides on purpose."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # when one process saves a checkpoint


def find_data_module(trainer: Trainer) -> RowsDataModule:
    """Returns the data module that the trainer was called with."""
    return cast(RowsDataModule, trainer.datamodule)  # type: ignore[attr-defined]  # Lightning sets it in fit


def mix_seed(seed: int, rank: int, number: int) -> int:
    """Returns a seed of 63 bits for a batch of a process, also where only the lower 32 are read, as on a CPU."""
    lower = int(np.random.SeedSequence([seed, rank]).generate_state(1)[0]) if seed or rank else 0
    return (((seed << 32) + number + (rank << 48)) ^ lower) % 2**63


def seed_device(seed: int, device: torch.device) -> None:
    """Seeds the generators of the CPU and of a device.

    `torch.manual_seed` formats the stack for every kind of device that isn't there, which takes longer than a small
    layer.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


class StepSeed(Callback):
    """Seeds dropout for each batch.

    The random numbers depend on the batch's number and not on previous batches.
    """

    def __init__(self, seed: int):
        self.seed = seed

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        """Seeds PyTorch with the run's seed, the batch's number, the rank of the data and the segment of its rows."""
        number = trainer.current_epoch * int(trainer.num_training_batches) + batch_idx
        data_rank, _ = find_data_module(trainer).find_rank()
        segment, segments = find_data_module(trainer).find_segment()
        seed_device(mix_seed(self.seed, data_rank * segments + segment, number), pl_module.device)


class EarlyStop(Callback):
    """Saves the best-scoring weights on validation and stops after `patience` epochs without a better score."""

    def __init__(self, folder: Path, patience: int, world: World | None = None):
        self.folder, self.patience, self.world = folder, patience, world or World()
        self.best, self.waited = float("-inf"), 0
        self.metrics: Metrics = {}  # of the most recent validation

    def state_dict(self) -> JsonObject:
        """Returns the best score, the number of epochs since, and the metrics of the last validation."""
        return {"best": self.best, "waited": self.waited, "metrics": self.metrics}

    def load_state_dict(self, state_dict: JsonObject) -> None:
        """Restores what `state_dict` returned."""
        self.best, self.waited = state_dict["best"], state_dict["waited"]
        self.metrics = state_dict.get("metrics", {})

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
            self.best, self.waited = score, 0
            with find_strategy(trainer).gather_weights(student):
                self._save(trainer, student)
        else:
            self.waited += 1
            self._stop_if_due(trainer)

    def restore(self, module: DistillationModule) -> None:
        """Loads the best weights into the student, if any were saved; every process calls it."""
        if not self.patience:
            return
        self.world.share_files(self.folder)
        if self.folder.exists():
            load_weights(self.folder, module.student)

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
