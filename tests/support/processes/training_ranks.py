"""Trains a tiny student on one of several processes, like the distill stage."""

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoModelForSequenceClassification, BertTokenizerFast

from distill.data.batches.data_module import TextDataModule
from distill.data.batches.sampling import ClassBalanced
from distill.data.batches.sampling_config import SamplingConfig
from distill.data.config import DataConfig
from distill.data.splits.examples import Examples, Splits
from distill.losses.config import LossConfig
from distill.parallel.layout import Layout, parse_layout
from distill.parallel.mesh import build_mesh
from distill.student.config import StudentConfig
from distill.tasks.text_classification import TextClassification
from distill.teacher.config import TeacherConfig
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from distill.train.spikes import SpikeDetector
from pipelines.runs import trainer
from pipelines.runs.console import Console
from pipelines.runs.manifest import SCRATCH
from pipelines.runs.placement import build_pipeline_trainer, load_in_layout, save_model
from pipelines.runs.processes import World, join_world
from pipelines.runs.training_job import TrainingJob
from pipelines.settings.commands.distill import DistillConfig, MachineConfig
from pipelines.settings.layouts import Layouts
from pipelines.stages.cache.online_teacher import call_teacher, load_online_teacher, serve_teacher
from support.dtypes import RecordDtypes, StartScale
from support.plans import plan_of
from support.tiny_models import LABELS, make_rows


@dataclass(frozen=True)
class Training:
    """A training job, independent of the layout."""

    student: Path
    folder: Path
    # A low learning rate: gradients of key biases are pure rounding errors, which Adam scales to full steps.
    train: TrainConfig = field(
        default_factory=lambda: TrainConfig(
            epochs=2, batch_size=7, accumulate=2, learning_rate=2e-4, max_grad_norm=0.1, dropout=0.0, patience=3
        )
    )
    loss: LossConfig = LossConfig(kl=0, ce=1)
    sampling: SamplingConfig = SamplingConfig()  # uniform or balanced
    machine: MachineConfig = MachineConfig(accelerator="cpu")
    precision: str = "32"
    stop: int | None = None  # stop every process after this many batches of the attempt
    spike: int | None = None  # the batch, counted from 0, whose loss is a spike
    teacher: Path | None = None  # queried in every step
    teacher_width: int = 32
    teacher_layout: str = "replicated"
    teachers: int = 0  # processes that only run the teacher
    offload: bool = False
    port: int = 1  # rendezvous port of teacher and student processes


def set_torchrun_environment(rank: int, processes: int, port: int = 1) -> None:
    """Sets the environment variables that define the process's rank and world."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    rest = {"GROUP_RANK": 0, "TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in (ranks | rest).items()})


class StoppedError(Exception):
    """Simulates a kill of all processes at once."""


class StopAfter(Callback):
    """Raises StoppedError after a number of batches."""

    def __init__(self, batches: int):
        self.left = batches

    def on_train_batch_start(self, *_: Any) -> None:
        if not self.left:
            raise StoppedError
        self.left -= 1


class SpikeAt(SpikeDetector):
    """Finds a spike in one batch of the first attempt."""

    def __init__(self, batch: int):
        super().__init__(math.inf)
        self.left = batch

    def is_spike(self, loss: float) -> bool:
        self.left -= 1
        return self.left == -1 or super().is_spike(loss)


def examples(count: int, seed: int) -> Examples:
    texts, labels = zip(*make_rows(count, seed), strict=True)
    return Examples(list(texts), None, [LABELS.index(label) for label in labels])


def splits() -> Splits:
    return Splits(LABELS, examples(40, 1), examples(11, 2), examples(5, 3), Examples([], None, []), {})


def train(rank: int, processes: int, job: Training, layout: str) -> dict[str, Any]:
    """Returns the gathered weights, the projections, the last metrics and the dtypes of a training.

    A teacher-only process returns {}.
    """
    if processes > 1:
        set_torchrun_environment(rank, processes, job.port)
    torch.manual_seed(0)
    world = World(rank, processes, dist.FileStore(f"{job.folder}.world", processes) if processes > 1 else None)
    if job.teachers:
        dist.destroy_process_group()
        world = join_world(120, job.teachers)
    if world.is_teacher:
        assert job.teacher is not None
        settings = DistillConfig(
            str(job.folder), TeacherConfig(str(job.teacher), online=True, processes=job.teachers),
            student=StudentConfig("layers=4"), data=DataConfig("unread"), loss=job.loss,
        )  # fmt: skip
        layouts = Layouts(parse_layout(job.teacher_layout, job.teachers), Layout(), Layout())
        serve_teacher(world, plan_of(settings, layouts))
        return {}
    try:
        return train_student(world, job, parse_layout(layout, world.size))
    except StoppedError:
        return {}


def train_student(world: World, job: Training, student_layout: Layout) -> dict[str, Any]:
    tokenizer = BertTokenizerFast.from_pretrained(job.student)
    auto = AutoModelForSequenceClassification
    mesh = build_mesh(student_layout, "cpu") if world.size > 1 else None
    student = (
        load_in_layout(job.student, auto, student_layout, mesh, precision=job.precision, offload=job.offload)
        if mesh
        else auto.from_pretrained(job.student)
    )
    remote = call_teacher(world, job.teacher) if job.teacher and job.teachers else None
    online_teacher = job.teacher if remote is None else None
    torch.manual_seed(world.rank)  # projections start differently on each process
    module = DistillationModule(
        student,
        loss=job.loss,
        train=job.train,
        metric=TextClassification(LABELS).scorer(),
        teacher_sizes=(4, job.teacher_width),
        shard_optimizer=student_layout.zero == 1,
        stages=build_pipeline_trainer(student, student_layout, mesh),
        signals=load_online_teacher(
            online_teacher,
            job.loss,
            parse_layout(job.teacher_layout, world.size),
            precision=job.precision,
            offload=job.offload,
        )
        if online_teacher
        else None,
    )
    data = TextDataModule(
        splits(),
        tokenizer,
        batch_size=job.train.batch_size,
        batch_tokens=job.train.batch_tokens,
        max_length=32,
        signals=remote,
    )
    if job.sampling.by == "balanced":  # between the first class and the others, which have four times its rows
        data.sampler = ClassBalanced(np.array(splits().train.labels) == 0, 0, job.sampling.unbiased)
    if job.spike is not None:
        module.spikes.detector = SpikeAt(job.spike)
    dtypes = RecordDtypes()
    (job.folder / SCRATCH).mkdir(parents=True, exist_ok=True)
    training_job = TrainingJob(
        label="student", train=job.train, machine=job.machine, precision=job.precision, seed=0,
        console=Console(quiet=True), wandb_folder=job.folder, layout=student_layout, mesh=mesh, world=world,
    )  # fmt: skip
    callbacks: list[Callback] = [dtypes, *([StartScale()] if job.precision == "16-mixed" else [])]
    callbacks += [] if job.stop is None else [StopAfter(job.stop)]
    metrics = trainer.fit_module(module, data, job.folder, training_job, callbacks)
    if remote is not None:
        remote.finish()
    save_model(student, tokenizer, job.folder / "model", world)
    weights = get_model_state_dict(student, options=StateDictOptions(full_state_dict=True))
    projections = module.layer_terms.state_dict()
    return {"weights": weights, "projections": projections, "metrics": metrics, "dtypes": dtypes.recorded}
