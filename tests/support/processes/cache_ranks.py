"""Writes a cache on one of several processes, with a teacher sharded across them."""

from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from distill.cache import Dense, Hidden, Identity, Sampled, plan
from distill.cache.samples import build_samples
from distill.data.batches.token_blocks import LanguageBlocks
from distill.parallel.layout import parse_layout
from distill.parallel.mesh import build_mesh
from distill.parallel.pipeline import PipelineForward
from distill.teacher.fingerprint import stored_fingerprint, weights_fingerprint
from distill.teacher.online import OnlineTeacher
from pipelines.runs.console import Console
from pipelines.runs.placement import load_in_layout
from pipelines.runs.processes import World
from pipelines.stages.cache.writing import write_together

BATCH_TOKENS = 128


def rows(count: int, vocabulary: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(5, vocabulary, rng.integers(2, 30)) for _ in range(count)]


def write(rank: int, processes: int, teacher: Path, cache: Path, layout: str, is_decoder: bool) -> str:
    """Fills the cache and returns the teacher's fingerprint."""
    plan.SHARD_TOKENS = 512
    teacher_layout = parse_layout(layout, processes)
    auto = AutoModelForCausalLM if is_decoder else AutoModelForSequenceClassification
    mesh = build_mesh(teacher_layout, "cpu") if processes > 1 else None
    model = load_in_layout(teacher, auto, teacher_layout, mesh, frozen=True) if mesh else auto.from_pretrained(teacher)
    vocabulary, width = model.config.vocab_size, model.config.hidden_size
    kinds = (
        (Sampled(vocabulary, draws=8),)
        if is_decoder
        else (Dense(model.config.num_labels), Hidden(width, layers=(0, 2)))
    )
    name = weights_fingerprint(model) if teacher_layout.pp == 1 else stored_fingerprint(teacher, auto)
    signals = ("logits",) if is_decoder else ("logits", "hidden")
    query_teacher: Any = OnlineTeacher(model, signals)
    if mesh is not None and teacher_layout.pp > 1:
        query_teacher = PipelineForward(
            model, mesh.get_group("pp"), micro_batches=1, hidden=() if is_decoder else (0, 2)
        )
    write_together(
        Console(quiet=True),
        World(rank, processes, dist.FileStore(f"{cache}.world", processes) if processes > 1 else None),
        cache,
        Identity(name, "test", kinds),
        build_samples(LanguageBlocks(rows(150, vocabulary)), 0),
        query_teacher,
        mesh if teacher_layout.sharded else None,
        batch_tokens=BATCH_TOKENS,
    )
    return name
