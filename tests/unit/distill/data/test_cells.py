"""Tests lists and numbers in text cells of csv and jsonl files: parsing, and the task inferred from them."""

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from transformers import BertConfig

from distill.data.config import DataConfig
from distill.data.rows.tagged import load_tagged
from distill.data.sources.cells import hold_fractions, hold_lists, parse_list, parse_literal
from distill.errors import InputError
from distill.tasks.choose import TASKS, choose_task

SEVERAL = [{"text": f"text {i}", "labels": [["a", "b"], [], ["b"]][i % 3]} for i in range(12)]
NUMBERS = [{"text": f"text {i}", "label": i / 4} for i in range(12)]
TAGGED = [{"tokens": ["one", f"[{i}]"], "ner_tags": [["O", "B-x"], ["B-x", "O"]][i % 2]} for i in range(12)]
CLASSES = [{"text": f"text {i}", "label": [7, 12][i % 2]} for i in range(12)]
RATED = [{"text": f"text {i}", "label": [1.0, 2.0][i % 2]} for i in range(12)]


def as_jsonl(rows: list[dict[str, Any]], file: Path) -> None:
    file.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def as_parquet(rows: list[dict[str, Any]], file: Path) -> None:
    pa.parquet.write_table(pa.Table.from_pylist(rows), file.with_suffix(".parquet"))


def as_csv(rows: list[dict[str, Any]], file: Path) -> None:
    """Writes a csv file as pandas does, with lists in Python's notation."""
    with file.with_suffix(".csv").open("w", newline="") as opened:
        csv.writer(opened).writerows([list(rows[0]), *(list(row.values()) for row in rows)])


@pytest.mark.parametrize("write", [as_jsonl, as_parquet, as_csv])
@pytest.mark.parametrize(
    ("rows", "task", "labels"),
    [
        (SEVERAL, "multi-label", ("a", "b")),
        (NUMBERS, "regression", ("number",)),
        (TAGGED, "token-classification", ("O", "B-x")),
        (CLASSES, "text-classification", ("7", "12")),
        (RATED, "text-classification", ("1.0", "2.0")),
    ],
    ids=["several", "numbers", "tagged", "classes", "rated"],
)
def test_the_task_and_its_labels_are_the_same_in_every_format(write, rows, task, labels, tmp_path):
    write(rows, tmp_path / "train")
    config = DataConfig(path=str(tmp_path))
    chosen, reason = choose_task("auto", BertConfig(architectures=["BertModel"]), "x", config)
    assert chosen == task, reason
    assert TASKS[chosen].read(config, 0).labels == labels


def test_only_lists_in_json_or_python_notation_are_parsed():
    wanted = ["a", "it's", "b, c"]
    for cell in (wanted, json.dumps(wanted), str(wanted), f" {wanted} \n", "['a',\n \"it's\", 'b, c']"):
        assert parse_list(cell) == wanted
    for cell in (
        None,
        3,
        "a",
        "[a, b]",
        "[ citation needed ]",
        "['a' 'b']",
        "['a'\n 'b']",
        "[" * 9999,
        "[1] [2]",
        "{}",
    ):
        assert parse_list(cell) is None
    with pytest.raises(ValueError, match="without a comma"):
        parse_literal("{'text': ['a' 'b']}")
    assert not hold_lists(["", None])
    assert not hold_lists(["['a']", "a"])
    assert hold_lists(["['a']", "", "[]"])


def test_ids_and_names_are_not_taken_for_fractions():
    assert hold_fractions(["0.5", "", "2", "-1e-3"])
    for cells in (
        ["1", "2"],
        ["1.0", "2.0"],
        ["0.5", "nan"],
        ["0.5", "inf"],
        ["0.5", "1_0"],
        ["1.5.2"],
        [True],
        [],
        [""],
    ):
        assert not hold_fractions(cells), cells


def test_brackets_in_texts_are_kept_and_malformed_lists_are_rejected(tmp_path):
    rows = [{"tokens": "[ citation needed ]", "tags": "O B-x B-x O"}, {"tokens": "[1] says", "tags": "O O"}] * 6
    as_csv(rows, tmp_path / "train")
    splits = load_tagged(DataConfig(path=str(tmp_path)))
    assert ["[", " citation", " needed", " ]"] in splits.train.texts
    assert ["[1]", " says"] in splits.train.texts
    for bad in ("[a, b]", "['a' 'b']"):
        as_csv([*rows, {"tokens": bad, "tags": "O O"}], tmp_path / "train")
        with pytest.raises(
            InputError, match="row 13, column 'tokens': expected a list in JSON or words between blanks"
        ):
            load_tagged(DataConfig(path=str(tmp_path)))
    as_csv([*SEVERAL, {"text": "x", "labels": "[a, b]"}], tmp_path / "train")
    with pytest.raises(InputError, match=r"row 13, column 'labels': expected labels as a list .* found '\[a, b\]'"):
        TASKS["multi-label"].read(DataConfig(path=str(tmp_path)), 0)
