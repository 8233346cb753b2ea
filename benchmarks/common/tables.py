"""Tables of texts that benchmarks read and write."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from distill.errors import InputError


def read_table(folder: Path, split: str) -> list[dict[str, Any]]:
    """Returns the rows of a split in a csv, jsonl or parquet file.

    Raises:
        InputError: There is no such file.
    """
    files = sorted(folder.glob(f"{split}.*"))
    if not files:
        raise InputError(f"data {str(folder)!r}: expected a file {split}.csv, .jsonl or .parquet, found none")
    file = files[0]
    if file.suffix == ".jsonl":
        return [json.loads(line) for line in file.read_text().splitlines()]
    if file.suffix == ".csv":
        with file.open(newline="") as lines:
            return list(csv.DictReader(lines))
    rows: list[dict[str, Any]] = pq.read_table(file).to_pylist()
    return rows


def find_table(folder: Path, *splits: str) -> list[dict[str, Any]] | None:
    """Returns the rows of the first of these splits that has a file; None if none has."""
    return next((read_table(folder, split) for split in splits if any(folder.glob(f"{split}.*"))), None)


def write_table(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes rows as lines of JSON."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def draw_few(rows: Sequence[Mapping[str, Any]], label: str, per_class: int, count: int, seed: int) -> list[int]:
    """Returns the numbers of `per_class` rows of each class or, without it, of `count` rows."""
    order = np.random.default_rng(seed).permutation(len(rows)).tolist()
    if not per_class:
        return sorted(order[:count])
    taken: dict[object, list[int]] = {}
    for row in order:
        class_rows = taken.setdefault(rows[row][label], [])
        if len(class_rows) < per_class:
            class_rows.append(row)
    return sorted(row for class_rows in taken.values() for row in class_rows)


def draw_others(rows: Sequence[Mapping[str, Any]], few: Sequence[int]) -> list[Mapping[str, Any]]:
    """Returns the rows that aren't among the few, in any order: files are often sorted by class."""
    taken = set(few)
    order = np.random.default_rng(1).permutation(len(rows)).tolist()
    return [rows[number] for number in order if number not in taken]
