"""Finds the columns that hold the text and the label."""

import difflib
from dataclasses import dataclass

import pyarrow as pa

from distill.data.config import DataConfig
from distill.errors import InputError

TEXT = ("text", "sentence", "sentence1", "premise", "question1", "question", "query", "utterance", "content", "review")
PAIR = ("text_pair", "text2", "sentence2", "hypothesis", "question2")
# A name before a number: `label_name` says what `label` 12 means.
LABEL = ("label_name", "label_text", "label", "labels", "category", "intent", "class", "target")

MARK = b"json"  # of a field whose cells were lists or objects, not text, in their file


@dataclass(frozen=True)
class Columns:
    """Names of the columns in use."""

    text: str
    text_pair: str | None
    label: str | None


def find_columns(table: pa.Table, config: DataConfig, where: str, *, labelled: bool = True) -> Columns:
    """Takes the columns the user named, or the first well-known name of each kind.

    Raises:
        InputError: A named column is missing, or none is found by name.
    """
    twice = sorted({name for name in table.column_names if table.column_names.count(name) > 1})
    if twice:
        raise InputError(f"{where}: column {twice[0]!r} stands there twice: it can't be told which one is meant")
    text = named(table, config.text, "text", where) or first_of(table, TEXT)
    pair = named(table, config.text_pair, "text_pair", where) or first_of(table, PAIR)
    label = (named(table, config.label, "label", where) or first_of(table, LABEL)) if labelled else None
    if text is None:
        raise missing("text", TEXT, table, where)
    if labelled and label is None:
        raise missing("label", LABEL, table, where)
    for name in filter(None, (text, pair)):
        check_text(table, name, where)
    return Columns(text, pair if pair != text else None, label)


def check_text(table: pa.Table, name: str, where: str) -> None:
    """
    Raises:
        InputError: The column holds lists or objects.
    """
    field = table.schema.field(name)
    if pa.types.is_nested(field.type) or MARK in (field.metadata or {}):
        found = field.type if pa.types.is_nested(field.type) else "JSON lists or objects"
        raise InputError(
            f"{where}: column {name!r}: expected text, found {found}: the model would learn how such values are "
            "written down"
        )


def named(table: pa.Table, name: str | None, flag: str, where: str) -> str | None:
    if name is None or name in table.column_names:
        return name
    near = difflib.get_close_matches(name, table.column_names, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise InputError(
        f"{where}: no column {name!r} (asked for with --data.{flag}), found {', '.join(table.column_names)}{hint}"
    )


def first_of(table: pa.Table, names: tuple[str, ...]) -> str | None:
    lower = {column.lower(): column for column in reversed(table.column_names)}
    return next((lower[name] for name in names if name in lower), None)


def missing(kind: str, names: tuple[str, ...], table: pa.Table, where: str) -> InputError:
    return InputError(
        f"{where}: no {kind} column: expected one of {', '.join(names)}, found {', '.join(table.column_names)}; "
        f"name it with --data.{kind}"
    )
