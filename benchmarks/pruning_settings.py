"""What every student of the comparison is made with: told anew, or taken from finished runs."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from benchmarks.pruning_peers import Lesson
from compress.prune.budget import Budget
from compress.prune.config import PruneConfig
from distill.data.config import DataConfig
from distill.data.sources.columns import find_columns
from distill.data.sources.tables import read_splits
from distill.losses.config import LossConfig
from distill.teacher.config import TeacherConfig
from distill.train.config import TrainConfig
from pipelines.settings.distill_config import DistillConfig, MachineConfig


def config_of(given: argparse.Namespace, seed: int) -> DistillConfig:
    """What a person would tell `pipelines.distill`; the other ways take their training from it."""
    path = limited(given.data, given.limit, Path(given.output)) if given.limit else given.data
    return DistillConfig(
        output=str(Path(given.output) / "ours" / f"seed-{seed}"),
        teacher=TeacherConfig(model=given.teacher, finetune="never"),
        budget=Budget(speedup=f"{given.speedup:g}", precision=given.precision),
        prune=PruneConfig(trials=given.trials),
        data=DataConfig(path=path, max_length=given.max_length, validation_fraction=given.validation_fraction),
        loss=LossConfig(temperature=given.temperature),
        train=TrainConfig(
            epochs=given.epochs,
            learning_rate=given.rates[0],
            batch_size=given.batch_size,
            dropout=0.0,
            freeze_embeddings=True,
        ),
        machine=MachineConfig(accelerator="cpu", precision="32", threads=given.threads),
        seed=seed,
    )


def config_of_run(folder: Path, speedup: float) -> DistillConfig:
    """The settings of a finished run, wherever its folder lies now, for one student of its family."""
    written = json.loads((folder / "config.json").read_text())
    config = rebuilt(DistillConfig, written | {"output": str(folder), "until": "distill"})
    if speedup not in config.budget.speedups:
        raise SystemExit(f"--ours {folder}: expected a run with --speedup {speedup:g}, found {config.budget.speedup}")
    own = str(config.budget.most_bytes(speedup) or "")
    return replace(config, budget=replace(config.budget, speedup=f"{speedup:g}", max_bytes=own))


def rebuilt(kind: Any, plain: Mapping[str, Any]) -> Any:
    """A dataclass from what `asdict` made of it."""
    kinds = {field.name: field.type for field in fields(kind)}
    return kind(
        **{name: rebuilt(kinds[name], value) if is_dataclass(kinds[name]) else value for name, value in plain.items()}
    )


def limited(path: str, limit: int, output: Path) -> str:
    """A copy of the data with `limit` rows to train on, the classes in turn."""
    folder = output / f"data-{limit}"
    folder.mkdir(parents=True, exist_ok=True)
    for split, table in read_splits(path).items():
        if split == "train":
            labels = table[str(find_columns(table, DataConfig(path=path), split).label)].to_pylist()
            seen: dict[Any, int] = {}
            turns = [seen.update({label: seen.get(label, 0) + 1}) or seen[label] for label in labels]
            table = table.take(np.sort(np.argsort(turns, kind="stable")[:limit]))
        pa.parquet.write_table(table, folder / f"{split}.parquet")
    return str(folder)


def settings_of(lesson: Lesson) -> dict[str, Any]:
    """All that decides a student but its seed and learning rate."""
    plain = asdict(lesson.config) | {"output": None, "seed": None, "until": None}
    plain["train"].pop("learning_rate")
    return plain
