"""The settings of the students of `pruned_students`: from its command line, or from finished runs."""

import argparse
import json
from collections import Counter
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import TypeVar, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from benchmarks.pruning.peers import TrainingSetup
from compress.prune.budget import Budget
from compress.prune.config import PruneConfig
from distill.data.config import DataConfig
from distill.data.sources.columns import find_columns
from distill.data.sources.tables import read_splits
from distill.losses.config import LossConfig
from distill.teacher.config import TeacherConfig
from distill.train.config import TrainConfig
from pipelines.runs.manifest import JsonObject
from pipelines.settings.commands.distill import DistillConfig, MachineConfig

Config = TypeVar("Config")
RATES = (5e-4, 1e-3)  # learning rates, unless others are set


def build_config(options: argparse.Namespace, seed: int) -> DistillConfig:
    """Returns the settings of `pipelines.distill`, from which the other methods take those of their training."""
    path = limit_rows(options.data, options.limit, Path(options.output)) if options.limit else options.data
    return DistillConfig(
        output=str(Path(options.output) / "ours" / f"seed-{seed}"),
        teacher=TeacherConfig(model=options.teacher, finetune="never"),
        budget=Budget(speedup=f"{options.speedup:g}", precision=options.precision).resolve(),
        prune=PruneConfig(trial_steps=options.trials),
        data=DataConfig(path=path, max_length=options.max_length, validation_fraction=options.validation_fraction),
        loss=LossConfig(temperature=options.temperature),
        train=TrainConfig(
            epochs=options.epochs,
            learning_rate=(options.rates or RATES)[0],
            batch_size=options.batch_size,
            dropout=0.0,
            freeze_embeddings=True,
        ),
        machine=MachineConfig(accelerator="cpu", precision="32", threads=options.threads),
        seed=seed,
    )


def read_config(folder: Path, speedup: float) -> DistillConfig:
    """Returns the settings of a finished run, even if its folder was moved, for one student of its family.

    Raises:
        SystemExit: The run has no student with this speedup.
    """
    stored = json.loads((folder / "config.json").read_text())
    config = build_dataclass(DistillConfig, stored | {"output": str(folder), "until": "distill"})
    if speedup not in config.budget.speedups:
        raise SystemExit(f"--ours {folder}: expected a run with --speedup {speedup:g}, found {config.budget.speedup}")
    max_bytes = str(config.budget.find_max_bytes(speedup) or "")
    return replace(config, budget=replace(config.budget, speedup=f"{speedup:g}", max_bytes=max_bytes))


def build_dataclass(kind: type[Config], values: JsonObject) -> Config:
    """Returns a dataclass from the dict that `asdict` made of it."""
    types = {field.name: field.type for field in fields(kind)}  # type: ignore[arg-type]
    built = {
        name: build_dataclass(cast(type, types[name]), value) if is_dataclass(types[name]) else value
        for name, value in values.items()
    }
    return kind(**built)


def limit_rows(path: str, limit: int, output: Path) -> str:
    """Returns a copy of the data with `limit` training rows, with equal numbers from the classes as far as possible."""
    folder = output / f"data-{limit}"
    folder.mkdir(parents=True, exist_ok=True)
    for split, table in read_splits(path).items():
        if split == "train":
            labels = table[str(find_columns(table, DataConfig(path=path), split).label)].to_pylist()
            counts: Counter[str | int] = Counter()
            occurrences = []  # of each row's label up to that row
            for label in labels:
                counts[label] += 1
                occurrences.append(counts[label])
            table = table.take(np.sort(np.argsort(occurrences, kind="stable")[:limit]))
        pa.parquet.write_table(table, folder / f"{split}.parquet")
    return str(folder)


def shared_settings(setup: TrainingSetup) -> JsonObject:
    """Returns all settings that determine a student, except its seed and learning rate."""
    settings = asdict(setup.config) | {"output": None, "seed": None, "until": None}
    settings["train"].pop("learning_rate")
    return settings
