"""Selection of the splits for evaluation: those with labels, and the split chosen for the report."""

from collections.abc import Callable, Mapping
from typing import TypeVar

import pyarrow as pa

from distill.data.config import DataConfig
from distill.data.sources.columns import find_column
from distill.data.sources.tables import read_splits
from distill.data.splits.findings import Findings
from distill.errors import InputError

_Part = TypeVar("_Part")
NO_PATH = "data: no path is set; name a folder, a file or a hub data set with --data"


def choose_test(parts: Mapping[str, _Part], config: DataConfig, findings: Findings) -> dict[str, _Part]:
    """Returns the splits, with the chosen one as test.

    Raises:
        InputError: The data set does not have the chosen split.
    """
    if config.test_split == "test":
        return dict(parts)
    if "validation" not in parts:
        raise InputError(
            f"data.test_split validation: expected a validation split in data {config.path!r}, found "
            f"{', '.join(parts)}: there would be nothing to evaluate on"
        )
    unused = ", and its test split isn't used" if "test" in parts else ""
    findings.counts["test_from"] = "the data set's validation split"
    findings.remarks.append(f"test: the data set's validation split{unused} (--data.test_split validation)")
    return {name: part for name, part in parts.items() if name not in ("validation", "test")} | {
        "test": parts["validation"]
    }


def read_evaluated(
    config: DataConfig,
    findings: Findings,
    has_labels: Callable[[dict[str, pa.Table], str], bool],
    read: Callable[[DataConfig], dict[str, pa.Table]] = lambda config: read_splits(config.path, config.subset),
) -> dict[str, pa.Table]:
    """Reads one table per split: train, and validation and test if they have labels.

    If they have none, they are left out, and rows are held out for them later.

    Args:
        config: Which data to read.
        findings: Receives the splits that were left out.
        has_labels: Returns whether a split, given all tables and its name, has any label.
        read: Reads all splits.

    Raises:
        InputError: `read` fails, no path is set, or the split chosen as test does not exist.
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


def find_label_column(table: pa.Table, config: DataConfig, names: tuple[str, ...]) -> str | None:
    """Returns the column named in the settings, else the first of these names; None if the table lacks it."""
    if config.label:
        return config.label if config.label in table.column_names else None
    return find_column(table, names)
