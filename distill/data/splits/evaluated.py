"""Which of a data set's splits are measured on: those with labels, and the one that is chosen for the report."""

from collections.abc import Callable, Mapping
from typing import TypeVar

import pyarrow as pa

from distill.data.config import DataConfig
from distill.data.sources.columns import first_of
from distill.data.sources.tables import read_splits
from distill.data.splits.findings import Findings
from distill.errors import InputError

Part = TypeVar("Part")
NO_PATH = "data: no path given; name a folder, a file or a hub data set with --data"


def choose_test(parts: Mapping[str, Part], config: DataConfig, findings: Findings) -> dict[str, Part]:
    """The splits with the chosen one in the place of test.

    Raises:
        InputError: The data set has no such split.
    """
    if config.test_split == "test":
        return dict(parts)
    if "validation" not in parts:
        raise InputError(
            f"data.test_split validation: expected a validation split in data {config.path!r}, found "
            f"{', '.join(parts)}: there would be nothing to measure on"
        )
    unused = ", and its test split isn't used" if "test" in parts else ""
    findings.counts["test_from"] = "the data set's validation split"
    findings.remarks.append(f"test: the data set's validation split{unused} (--data.test_split validation)")
    return {name: part for name, part in parts.items() if name not in ("validation", "test")} | {
        "test": parts["validation"]
    }


def read_measured(
    config: DataConfig,
    findings: Findings,
    has_labels: Callable[[dict[str, pa.Table], str], bool],
    read: Callable[[DataConfig], dict[str, pa.Table]] = lambda config: read_splits(config.path, config.subset),
) -> dict[str, pa.Table]:
    """A table a split: train, and of validation and test those that have labels; rows are held out for the others.

    Args:
        config: What to read.
        findings: Where it goes which split was left out.
        has_labels: Whether a split, given by its name among all, has any label.
        read: Reads all splits.

    Raises:
        InputError: What `read` raises, no path, or no split to take in the place of test.
    """
    if not config.path:
        raise InputError(NO_PATH)
    tables = choose_test(read(config), config, findings)
    for split in ("validation", "test"):
        if split in tables and not has_labels(tables, split):
            rows = len(tables.pop(split))
            other = "; --data.test_split validation takes another" if split == "test" and "validation" in tables else ""
            remark = f"{split}: the data set's {rows:,} rows have no labels, and are left out of the report{other}"
            findings.add(f"{split}_dropped_unlabelled", rows, remark)
    return tables


def label_column(table: pa.Table, config: DataConfig, names: tuple[str, ...]) -> str | None:
    """The column that the settings name, else the first of these names; None where the table lacks it."""
    return first_of(table, (config.label,) if config.label else names)
