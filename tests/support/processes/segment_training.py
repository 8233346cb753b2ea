"""Trains tiny language models on one process, or on several that have segments of the same rows."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import PreTrainedModel

from distill.cache import CacheReader, Dense, Identity, Sampled, TopK, build_samples, write_cache
from distill.cache.signals import Signal
from distill.data.batches.data_module import RowsDataModule
from distill.data.batches.packing import PackedRows
from distill.data.batches.token_blocks import LanguageBlocks
from distill.data.masking.config import MaskConfig
from distill.data.masking.masks import MaskedBlocks
from distill.data.rows.chat import TargetBlocks
from distill.losses.config import LossConfig
from distill.parallel.layout import Layout, parse_layout
from distill.parallel.mesh import build_mesh
from distill.tasks.language import TokenScorer
from distill.teacher.online import OnlineTeacher
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from pipelines.runs import trainer
from pipelines.runs.console import Console
from pipelines.runs.manifest import SCRATCH
from pipelines.runs.placement import load_in_layout
from pipelines.runs.processes import World
from pipelines.runs.training_job import TrainingJob
from pipelines.settings.commands.distill import MachineConfig
from pipelines.stages.cache.online_teacher import load_online_teacher
from support.processes.training_ranks import StopAfter, StoppedError, set_torchrun_environment
from support.tiny_models import draw_weights

WORDS, MASK_ID = 67, 66
SIZES: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0}
TRAIN = TrainConfig(
    epochs=2, batch_size=7, accumulate=2, learning_rate=2e-3, max_grad_norm=0.1, dropout=0.0, patience=0
)
SIGNALS: dict[str, Signal] = {
    "sampled": Sampled(WORDS, draws=8),
    "topk": TopK(WORDS, k=5),
    "logits": Dense(WORDS, each="position", dtype="float32"),
}


@dataclass(frozen=True)
class SegmentJob:
    """A training job, independent of the layout.

    Args:
        name: Names its folder.
        rows: Kind of rows: `texts`, `packed`, `chat` or `masked`.
        loss: The terms.
        cached: Name in SIGNALS; empty for a teacher that is queried in each step, if a term needs one.
        train: Settings of the training.
        stop: Every process stops after this many batches of the attempt.
    """

    name: str
    rows: str = "texts"
    loss: LossConfig = LossConfig(kl=0, ce=1)
    cached: str = ""
    train: TrainConfig = field(default_factory=lambda: TRAIN)
    stop: int | None = None


def build_decoder(layers: int = 2, **changes: Any) -> PreTrainedModel:
    """Returns a decoder with a tied head and grouped key and value heads."""
    sizes = SIZES | {"num_key_value_heads": 2, "tie_word_embeddings": True, "num_hidden_layers": layers}
    torch.manual_seed(layers)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(sizes | changes)))
    draw_weights(model)
    return model


def build_encoder(layers: int = 2) -> PreTrainedModel:
    torch.manual_seed(layers)
    model = transformers.BertForMaskedLM(transformers.BertConfig(**(SIZES | {"num_hidden_layers": layers})))
    draw_weights(model)
    return model


def save_models(folder: Path) -> Path:
    """Saves a student and a teacher of each kind, and a cache of each kind of signals."""
    for kind, build in (("decoder", build_decoder), ("encoder", build_encoder)):
        build(2).save_pretrained(folder / kind / "student")
        build(3).save_pretrained(folder / kind / "teacher")
        rows = build_rows("texts" if kind == "decoder" else "masked", 1, 30)
        for name, signal in SIGNALS.items():
            teacher = OnlineTeacher(build(3).eval())
            write_cache(folder / kind / name, Identity(kind, "words", (signal,)), build_samples(rows, 0), teacher)
    return folder


def build_rows(kind: str, seed: int, count: int) -> Any:
    """Returns rows of 2 to 24 tokens."""
    rng = np.random.default_rng(seed)
    ids = [rng.integers(3, MASK_ID, rng.integers(2, 25)) for _ in range(count)]
    if kind == "chat":  # targets at the end, so that the first segment often has none
        return TargetBlocks(ids, [np.arange(len(row)) >= max(1, len(row) - 3) for row in ids])
    blocks = LanguageBlocks(ids)
    if kind == "packed":
        return PackedRows.build(blocks, 41)
    return MaskedBlocks(blocks, MaskConfig(passes=1), MASK_ID, WORDS, (0, 1, 2)) if kind == "masked" else blocks


def train_jobs(
    rank: int, processes: int, models: Path, folder: Path, jobs: Sequence[SegmentJob], layout: str, teacher: str = ""
) -> dict[str, dict[str, Any]]:
    """Returns the gathered weights of the module and the last metrics of each job; {} for one that was stopped."""
    if processes > 1:
        set_torchrun_environment(rank, processes)
    results: dict[str, dict[str, Any]] = {}
    for job in jobs:
        try:
            results[job.name] = train_job(rank, processes, models, folder / job.name, job, layout, teacher or layout)
        except StoppedError:
            results[job.name] = {}
    return results


def train_job(
    rank: int, processes: int, models: Path, folder: Path, job: SegmentJob, layout: str, teacher: str
) -> dict[str, Any]:
    model_folder = models / ("encoder" if job.rows == "masked" else "decoder")
    auto = transformers.AutoModelForMaskedLM if job.rows == "masked" else transformers.AutoModelForCausalLM
    student_layout, mesh = parse_layout(layout, processes) if processes > 1 else Layout(), None
    torch.manual_seed(0)
    if processes > 1:
        mesh = build_mesh(student_layout, "cpu")
        student = load_in_layout(model_folder / "student", auto, student_layout, mesh)
    else:
        student = auto.from_pretrained(model_folder / "student")
    online = None
    if job.loss.needs_teacher and not job.cached:
        teacher_layout = parse_layout(teacher, processes) if processes > 1 else Layout()
        online = load_online_teacher(model_folder / "teacher", job.loss, teacher_layout)
    module = DistillationModule(
        student, loss=job.loss, train=job.train, metric=TokenScorer(), signals=online, teacher_sizes=(3, 32)
    )
    data = RowsDataModule(
        build_rows(job.rows, 1, 30),
        build_rows(job.rows, 2, 9),
        batch_size=job.train.batch_size,
        signals=CacheReader(model_folder / job.cached) if job.cached else None,
    )
    (folder / SCRATCH).mkdir(parents=True, exist_ok=True)
    store = dist.FileStore(f"{folder}.world", processes) if processes > 1 else None
    training_job = TrainingJob(
        label="student", train=job.train, machine=MachineConfig(accelerator="cpu"), precision="32", seed=0,
        console=Console(quiet=True), wandb_folder=folder, layout=student_layout, mesh=mesh,
        world=World(rank, processes, store),
    )  # fmt: skip
    callbacks = [] if job.stop is None else [StopAfter(job.stop)]
    metrics = trainer.fit_module(module, data, folder, training_job, callbacks)
    weights = get_model_state_dict(student, options=StateDictOptions(full_state_dict=True))
    copies = {name: value.clone() for name, value in weights.items()}
    outside = {f"layer_terms.{name}": value for name, value in module.layer_terms.state_dict().items()}
    return {"weights": copies | outside, "metrics": metrics, "fused": module.fused_term.has_plain_head}
