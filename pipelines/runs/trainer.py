"""The Lightning Trainer of a stage: progress, logs, and checkpoints from which a run resumes bit-identically."""

import gc
import logging
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger, Logger

from compress.measure.precision_modes import (
    MODES,
    convert_to_mode,
    restore_stock_layers,
)
from distill.data.batches.data_module import RowsDataModule
from distill.errors import InputError
from distill.train.module import DistillationModule
from distill.train.spikes import LossSpikeError
from pipelines.runs import stops
from pipelines.runs.callbacks.early_stop import EarlyStop
from pipelines.runs.callbacks.fit_progress import FitProgress
from pipelines.runs.callbacks.step_seed import StepSeed
from pipelines.runs.checkpoint_schedule import CheckpointWriter
from pipelines.runs.failure_reports import PositionRecorder
from pipelines.runs.files import recover_folder
from pipelines.runs.loss_scaling import LossScaling
from pipelines.runs.manifest import LOGS, SCRATCH
from pipelines.runs.memory.plan import fit_into_memory
from pipelines.runs.range_test import find_rate
from pipelines.runs.rank_meter import build_meter
from pipelines.runs.recovery import Recovery
from pipelines.runs.strategies.by_layout import build_strategy, choose_device, find_strategy
from pipelines.runs.trainer_state import Metrics, read_validation_metrics
from pipelines.runs.training_job import TrainingJob
from pipelines.runs.training_logs import TrainingLogs
from pipelines.settings.commands.distill import MachineConfig

_COLLECTED_FROM = 16 << 20  # bytes of weights; for smaller models, garbage collection takes longer than it helps


def fit_module(
    module: DistillationModule,
    data: RowsDataModule,
    folder: Path,
    job: TrainingJob,
    callbacks: Sequence[Callback] = (),
) -> Metrics:
    """Trains `module`, resuming from the last checkpoint in `folder` if there is one; returns the validation metrics.

    They are those of the weights that the student has afterwards, with what was found before the training: the learning
    rate of a range test, and the bits of optimizer states that a memory limit reduced.

    Every process of the run calls this with the student laid out on the job's mesh according to its layout. Changes
    that `callbacks` make after a batch are included in the checkpoint written after it.

    Raises:
        InputError: Lightning doesn't support the requested devices and precision here.
    """
    silence_lightning()
    free_earlier_trainings(module)
    train, machine, world = job.train, job.machine, job.world
    if machine.threads:
        torch.set_num_threads(machine.threads)
    scratch = module.scratch = folder / SCRATCH
    logs = TrainingLogs(folder / LOGS)
    recovery = Recovery(logs.spikes, scratch / "checkpoints", train.recoveries, world)
    checkpoints = CheckpointWriter(recovery.checkpoints, train.checkpoint_every, world, from_start=recovery.limit > 0)
    stopper = EarlyStop(scratch / "best", train.patience, world)
    if world.manages_files:
        recover_folder(stopper.folder)
    progress = FitProgress(job.console, job.label, train)
    positions = PositionRecorder(world.everyone)
    meter = build_meter(machine.rank_speeds, data, job.layout, logs)
    convert_precision(job.precision, module)
    found = fit_into_memory(module, data, folder / LOGS, job)
    found |= apply_range_test(module, data, logs.range_test, job)
    while True:
        trainer = build_trainer(
            job,
            log_every=min(machine.log_every, max(1, len(data.train_dataloader()) // 4)),
            callbacks=[StepSeed(job.seed), *callbacks, *meter, checkpoints, stopper, progress, positions],
            logger=build_loggers(folder, job) if world.is_rank_zero else False,
        )
        recovery.prepare(module)
        try:
            with progress, checkpoints:
                trainer.fit(module, datamodule=data, ckpt_path=checkpoints.find_latest(), weights_only=True)
            break
        except LossSpikeError as error:
            recovery.record(error, job.console, job.label)
    stops.raise_if_requested()
    job.console.say(f"  {job.label}: {data.wait_share:.1%} of the time was spent waiting for data")
    if world.is_rank_zero:
        logs.write_falls(module.rate_control.falls)
    find_strategy(trainer).restore_weights(module)
    metrics = stopper.restore(module)
    if not MODES[job.precision].is_stock:
        restore_stock_layers(module.student)
    return metrics | found


def free_earlier_trainings(module: DistillationModule) -> None:
    """Frees what earlier trainings of this process held, before one that needs memory.

    Lightning's objects refer to each other, so Python would free models and optimizer states of an earlier training
    late: in the middle of this one.
    """
    if sum(parameter.nbytes for parameter in module.parameters()) >= _COLLECTED_FROM:
        gc.collect()


def apply_range_test(module: DistillationModule, data: RowsDataModule, file: Path, job: TrainingJob) -> Metrics:
    """Gives the module the learning rate of a range test, if the schedule is `find`, and returns the rate."""
    if job.train.schedule != "find":
        return {}
    module.train_config = find_rate(module, data, file, job.seed, job.precision)
    rate = module.train_config.peak_rate
    job.console.say(f"  {job.label}: the range test found a learning rate of {rate:.2g}")
    return {"found/learning_rate": rate}


def build_trainer(
    job: TrainingJob, *, log_every: int, callbacks: list[Callback], logger: list[Logger] | bool
) -> Trainer:
    """Returns the Lightning trainer of a stage.

    Raises:
        InputError: Lightning doesn't support the requested devices and precision here.
    """
    train, layout = job.train, job.layout
    local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    try:
        return Trainer(
            accelerator=job.machine.accelerator,
            devices=local_processes,
            num_nodes=layout.processes // local_processes,
            strategy=build_strategy(layout, job.machine, job.mesh),
            **precision_arguments(job.precision, job.machine),
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


def convert_precision(precision: str, module: DistillationModule) -> None:
    """Gives the module the layers, weights and rounding of a mode of `compress.measure.precision_modes`."""
    if MODES[precision].is_stock:
        return
    convert_to_mode(precision, module.student)
    convert_to_mode(precision, module.layer_terms)
    module.stochastic_rounding = MODES[precision].stochastic_rounding


def build_loggers(folder: Path, job: TrainingJob) -> list[Logger]:
    """Returns the CSV logger and, if requested, the Weights & Biases logger.

    Each attempt has its own CSV file, so that a resumed run keeps the rows written before a kill.
    """
    attempts = len(list((folder / LOGS).glob("attempt-*")))
    chosen: list[Logger] = [CSVLogger(folder / LOGS, name="", version=f"attempt-{attempts}")]
    if job.machine.wandb != "off":
        from lightning.pytorch.loggers import WandbLogger

        os.environ.setdefault("WANDB_SILENT", "true")
        job.wandb_folder.mkdir(parents=True, exist_ok=True)
        is_offline = job.machine.wandb == "offline"
        chosen.append(WandbLogger(name=job.label, project="stillroom", save_dir=job.wandb_folder, offline=is_offline))
    return chosen


def silence_lightning() -> None:
    """Silences Lightning's hints, which concern defaults that this module overrides on purpose."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # when one process saves a checkpoint
