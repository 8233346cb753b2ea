"""The data stage: reads, checks and splits the data, and writes the files that all later stages read."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from distill.checkpoint.digest import hash_content, hash_file
from distill.data.config import DataConfig
from distill.data.rows.documents import load_documents
from distill.data.rows.reading_remarks import describe_reading
from distill.data.rows.sentences import LINES
from distill.data.sources import text_batches
from distill.data.sources.files import find_format
from distill.data.sources.stored_texts import StoredTexts
from distill.data.sources.tables import find_split_files, read_splits
from distill.data.sources.text_column import iterate_cells
from distill.data.sources.text_files import find_text_files
from distill.data.splits.examples import Examples, Splits
from distill.tasks.choose import TASKS
from distill.tasks.language import CausalLM, MaskedLM
from distill.tasks.task import Task
from distill.tasks.text_classification import TextClassification
from pipelines.runs.console import Console
from pipelines.runs.manifest import SCRATCH, JsonObject
from pipelines.runs.stage import Artefact, Run

VERSION = 2  # of this stage's algorithm; bump it when the same inputs give a different result (docs/stages.md)
OTHER_STAGES = ("path", "unlabelled", "max_length", "packing")  # settings without effect on this stage
PLAIN_TEXT = (CausalLM.name, MaskedLM.name)
SPLIT_NAMES = ("train", "validation", "test", "unlabelled")


def data_stage(
    run: Run, config: DataConfig, task: str = TextClassification.name, arguments: Mapping[str, Any] | None = None
) -> Artefact:
    """Writes a parquet file per split, the labels and the counts, in the form of the task.

    Args:
        run: The run.
        config: The data set.
        task: The task's name in TASKS.
        arguments: Further settings of the task.
    """
    settings = {name: value for name, value in asdict(config).items() if name not in OTHER_STAGES}
    settings |= {"task": task} if task != TextClassification.name else {}
    settings |= {"task_arguments": dict(arguments)} if arguments else {}
    inputs = {"data": run.world.compute_once(lambda: hash_source(config, run.digests.hash_file))}
    print_reading_remarks(run.console, config)
    if config.unlabelled is not None:
        inputs["unlabelled"] = run.content_hash(Path(config.unlabelled).expanduser())

    def work(folder: Path) -> JsonObject:
        splits = read_task_splits(task, config, run.seed, folder / SCRATCH)
        write_splits(splits, folder, settings)
        counts = {part: len(getattr(splits, part)) for part in SPLIT_NAMES} | {"classes": len(splits.labels)}
        return counts | splits.notes | {"remarks": list(splits.remarks)}

    done = run.stage("data", settings, inputs, work, version=VERSION)
    for remark in done.metrics.get("remarks", []):
        run.console.say(f"  {remark}")
    return done


def print_new_remarks(console: Console, stage: Artefact, data: Artefact) -> None:
    """Prints the remarks of a stage that writes the data anew, after those of the data that it read."""
    for remark in stage.metrics.get("remarks", [])[len(data.metrics.get("remarks", [])) :]:
        console.say(f"  {remark}")


def read_task_splits(task: str, config: DataConfig, seed: int, scratch: Path) -> Splits:
    """Returns the splits of a data set; those of plain text that may not fit into memory are files in `scratch`."""
    if task in PLAIN_TEXT:
        return load_documents(config, seed, scratch)
    return TASKS[task].read(config, seed)


def print_reading_remarks(console: Console, config: DataConfig) -> None:
    """Prints which parts of a data set aren't read, and which are read differently than their names suggest."""
    for line in describe_reading(config):
        console.say(f"  data: {line}")


def hash_source(config: DataConfig, hash_one: Callable[[Path], str] = hash_file) -> str:
    """Returns a hash of the data to be read: of file contents, or of the rows of a hub data set.

    `hash_one` computes the hash of a file or looks it up.
    """
    path = Path(config.path).expanduser()
    if path.is_file():
        return hash_one(path)
    total = hashlib.sha256()
    if path.is_dir() and (files := find_text_files(config.path)):
        for split, each in sorted(files.items()):
            total.update("".join(f"{split}:{hash_one(file)}" for file in each).encode())
    elif (path / LINES).is_file():
        total.update("".join(f"{file.name}:{hash_content(file, hash_one)}" for file in sorted(path.iterdir())).encode())
    elif path.is_dir():
        for split, file in sorted(find_split_files(path).items()):
            total.update(f"{split}:{find_format(file)}:{hash_one(file)}".encode())
    else:
        for split, table in sorted(read_splits(config.path, config.subset).items()):
            total.update(f"{split}:".encode())
            for piece in yield_json(table):
                total.update(piece.encode())
    return total.hexdigest()


def yield_json(table: pa.Table) -> Iterator[str]:
    """Yields `json.dumps(table.to_pydict(), default=str)` in parts, for which few cells exist at a time."""
    yield "{"
    for number, name in enumerate(table.column_names):
        yield f"{', ' if number else ''}{json.dumps(name)}: ["
        for row, cell in enumerate(iterate_cells(table[name])):
            yield f"{', ' if row else ''}{json.dumps(cell, default=str)}"
        yield "]"
    yield "}"


def write_splits(splits: Splits, folder: Path, settings: JsonObject) -> None:
    """Writes the splits, the labels and the task's settings to a stage's folder."""
    for name in SPLIT_NAMES:
        part, file = getattr(splits, name), folder / f"{name}.parquet"
        if isinstance(part, Examples) and isinstance(part.texts, StoredTexts):
            part.texts.copy_to(file)
        else:
            pa.parquet.write_table(part.table(), file)
    description: JsonObject = {"task": settings.get("task", TextClassification.name), "labels": splits.labels}
    description |= {"notes": splits.notes, "remarks": list(splits.remarks)}
    description |= {"task_arguments": settings["task_arguments"]} if "task_arguments" in settings else {}
    (folder / "data.json").write_text(json.dumps(description, indent=1))


def read_task_settings(artefact: Artefact) -> JsonObject:
    """Returns the settings of `write_splits` for a stage that changes the data of another."""
    description = json.loads((artefact.folder / "data.json").read_text())
    return {name: description[name] for name in ("task", "task_arguments") if name in description}


def read_data(artefact: Artefact) -> Splits:
    """Reads the splits that the data stage wrote; large ones of plain text stay in their files."""
    return read_data_folder(artefact.folder)


def read_data_folder(folder: Path) -> Splits:
    """Reads the splits from the data stage's folder."""
    description = json.loads((folder / "data.json").read_text())
    parts = {name: read_part(folder / f"{name}.parquet", description["task"]) for name in SPLIT_NAMES}
    return Splits(tuple(description["labels"]), **parts, notes=description["notes"], remarks=description["remarks"])


def read_part(file: Path, task: str) -> Any:
    """Reads a split that the data stage wrote."""
    if task in PLAIN_TEXT and file.stat().st_size >= text_batches.LARGE:
        return Examples(StoredTexts(file))
    return TASKS[task].split_class.from_table(pa.parquet.read_table(file))


def read_task(artefact: Artefact) -> Task:
    """Returns the task that the data stage wrote the data for, with its labels."""
    description = json.loads((artefact.folder / "data.json").read_text())
    return TASKS[description["task"]].build(description["labels"], description.get("task_arguments", {}))
