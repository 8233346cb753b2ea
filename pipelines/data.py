"""The data stage: read, check, split, and write down what every later stage reads."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from distill.data.config import DataConfig
from distill.data.source import read_splits, split_files
from distill.data.splits import Examples, Splits
from distill.data.tagged import Tagged
from distill.tasks.choose import TASKS, is_list
from distill.tasks.task import Task
from distill.tasks.text_classification import TextClassification
from pipelines.stage import Artefact, Run, content_hash

PARTS = ("train", "validation", "test", "unlabelled")


def data_stage(run: Run, config: DataConfig, task: str = TextClassification.name) -> Artefact:
    """Writes a parquet file a split, the labels and the counts, in the form of the task with this name in TASKS."""
    settings = {k: v for k, v in asdict(config).items() if k not in ("path", "unlabelled", "max_length")}
    settings |= {"task": task} if task != TextClassification.name else {}
    inputs = {"data": source_hash(config)}
    if config.unlabelled is not None:
        inputs["unlabelled"] = content_hash(Path(config.unlabelled).expanduser())

    def work(folder: Path) -> dict[str, Any]:
        splits = TASKS[task].read(config, run.seed)
        write_splits(splits, folder, task)
        return {part: len(getattr(splits, part)) for part in PARTS} | {"classes": len(splits.labels)} | splits.notes

    return run.stage("data", settings, inputs, work)


def source_hash(config: DataConfig) -> str:
    """Hash of what will be read: file contents, or the rows of a hub data set."""
    place = Path(config.path).expanduser()
    if place.is_file():
        return content_hash(place)
    total = hashlib.sha256()
    if place.is_dir():
        for split, file in sorted(split_files(place).items()):
            total.update(f"{split}:{file.suffix}:{content_hash(file)}".encode())
    else:
        for split, table in sorted(read_splits(config.path, config.subset).items()):
            total.update(f"{split}:{json.dumps(table.to_pydict(), default=str)}".encode())
    return total.hexdigest()


def write_splits(splits: Splits, folder: Path, task: str) -> None:
    for part in PARTS:
        examples: Examples | Tagged = getattr(splits, part)
        kind = pa.list_(pa.string()) if isinstance(examples, Tagged) else pa.string()
        columns: dict[str, Any] = {"text": pa.array(examples.texts, kind)}
        if examples.pairs is not None:
            columns["text_pair"] = pa.array(examples.pairs, pa.string())
        if part != "unlabelled":
            columns["label"] = pa.array(examples.labels)
        pa.parquet.write_table(pa.table(columns), folder / f"{part}.parquet")
    (folder / "data.json").write_text(
        json.dumps({"task": task, "labels": splits.labels, "notes": splits.notes}, indent=1)
    )


def read_data(artefact: Artefact) -> Splits:
    """The splits that the data stage wrote."""
    about = json.loads((artefact.folder / "data.json").read_text())
    parts = {part: read_examples(artefact.folder / f"{part}.parquet") for part in PARTS}
    return Splits(tuple(about["labels"]), **parts, notes=about["notes"])


def read_task(artefact: Artefact) -> Task:
    """The task that the data stage wrote for, with its labels."""
    about = json.loads((artefact.folder / "data.json").read_text())
    return TASKS[about["task"]](tuple(about["labels"]))


def read_examples(file: Path) -> Examples | Tagged:
    table = pa.parquet.read_table(file)
    names = table.column_names
    if is_list(table["text"]):
        return Tagged(table["text"].to_pylist(), table["label"].to_pylist() if "label" in names else [])
    return Examples(
        table["text"].to_pylist(),
        table["text_pair"].to_pylist() if "text_pair" in names else None,
        table["label"].to_pylist() if "label" in names else [],
    )
