"""Selection and checks of the columns with the text and the label."""

import difflib
from dataclasses import dataclass

import pyarrow as pa

from distill.data.config import DataConfig
from distill.errors import InputError

TEXT = ("text", "sentence", "sentence1", "premise", "question1", "question", "query", "utterance", "content", "review")
PAIR = ("text_pair", "text2", "sentence2", "hypothesis", "question2")
# Columns of names come before columns of numbers: `label_name` contains the meaning of `label` 12.
LABEL = ("label_name", "label_text", "label", "labels", "category", "intent", "class", "target")
SCORE = ("score", "similarity", "similarity_score", "relatedness")  # columns with a number in each row

MARK = b"json"  # metadata of fields whose cells were lists or objects, not text, in the file


@dataclass(frozen=True)
class Columns:
    """Names of the columns that are read."""

    text: str
    text_pair: str | None
    label: str | None


def find_columns(
    table: pa.Table, config: DataConfig, where: str, *, labelled: bool = True, labels: tuple[str, ...] = LABEL
) -> Columns:
    """Returns the columns set in `config`, or else the first well-known name of each kind, for labels one of `labels`.

    Raises:
        InputError: A column set in `config` is missing, no well-known name is found, a column is selected twice, or a
            column does not contain text.
    """
    text = require_column(table, config.text, "text", where) or find_column(table, TEXT)
    pair = require_column(table, config.text_pair, "text_pair", where) or find_column(table, PAIR)
    label = (require_column(table, config.label, "label", where) or find_column(table, labels)) if labelled else None
    if text is None:
        raise missing_column_error("text", TEXT, table, where)
    if labelled and label is None:
        raise missing_column_error("label", labels, table, where)
    if config.text_pair is None and pair == text:
        pair = None
    check_distinct(where, text=text, text_pair=pair, label=label)
    for name in filter(None, (text, pair)):
        check_text(table, name, where)
    if label is not None:
        _check_label(table, label, where)
    return Columns(text, pair, label)


def check_distinct(where: str, **columns: str | None) -> None:
    """Checks that the settings, passed as keyword arguments, name different columns.

    Raises:
        InputError: Two settings name the same column.
    """
    seen: dict[str, str] = {}
    for flag, name in columns.items():
        if name is not None and name in seen:
            raise InputError(
                f"{where}: expected different columns for data.{seen[name]} and data.{flag}, found {name!r} for both: "
                f"{_explain_duplicate(flag)}; name another with --data.{seen[name]} or --data.{flag}"
            )
        if name is not None:
            seen[name] = flag


def _explain_duplicate(flag: str) -> str:
    if flag == "text_pair":
        return "each text would be compared with itself"
    return "each text would contain what the model has to predict"


def check_text(table: pa.Table, name: str, where: str) -> None:
    """Checks that a column contains text.

    Raises:
        InputError: The column contains lists, objects, bytes or, in a file with types, numbers.
    """
    field = table.schema.field(name)
    if MARK in (field.metadata or {}):
        raise _not_text_error(name, "JSON lists or objects", where)
    check_readable(table, name, where)
    kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
    if not (_is_string(kind) or pa.types.is_null(kind)):
        raise _not_text_error(name, str(field.type), where)


def _check_label(table: pa.Table, name: str, where: str) -> None:
    """Checks that a column can contain labels.

    Raises:
        InputError: The column contains bytes or objects.
    """
    check_readable(table, name, where)
    kind = table.schema.field(name).type
    objects = pa.types.is_struct(kind) or pa.types.is_map(kind)
    if MARK in (table.schema.field(name).metadata or {}):
        objects = any(cell is not None and cell.startswith("{") for cell in table[name].to_pylist())
    if objects:
        raise InputError(
            f"{where}: column {name!r}: expected labels, found objects: their written form would be taken for the name "
            "of a class; name another column with --data.label"
        )


def _not_text_error(name: str, found: str, where: str) -> InputError:
    return InputError(
        f"{where}: column {name!r}: expected text, found {found}: the model would learn the written form of such values"
    )


def _is_string(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def check_readable(table: pa.Table, name: str, where: str) -> None:
    """Checks that a column contains no binary data.

    Raises:
        InputError: The column contains bytes, possibly nested in lists or objects.
    """
    kind = table.schema.field(name).type
    if _contains_bytes(kind):
        raise InputError(
            f"{where}: column {name!r}: expected text, found {kind}, bytes that need not be text, such as an image: "
            "Python's notation of them would be taken for text; cast the column to string if it is text, or name "
            "another"
        )


def _contains_bytes(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        return _contains_bytes(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return _contains_bytes(kind.value_type)
    if pa.types.is_nested(kind):
        return any(_contains_bytes(kind.field(i).type) for i in range(kind.num_fields))
    return any(
        is_kind(kind)
        for is_kind in (
            pa.types.is_binary,
            pa.types.is_large_binary,
            pa.types.is_fixed_size_binary,
            pa.types.is_binary_view,
        )
    )


def require_column(table: pa.Table, name: str | None, flag: str, where: str) -> str | None:
    """Returns the name of a column that a setting requests; None if it is not set.

    Raises:
        InputError: The table has no such column.
    """
    if name is None or name in table.column_names:
        return name
    nearest = difflib.get_close_matches(name, table.column_names, 1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    raise InputError(f"{where}: no column {name!r} (set by --data.{flag}), found {', '.join(table.column_names)}{hint}")


def find_column(table: pa.Table, names: tuple[str, ...]) -> str | None:
    """Returns the column with the first of these names that exists, ignoring case; None if there is none.

    Raises:
        InputError: Two columns have this name, in different cases.
    """
    for name in names:
        matches: list[str] = [column for column in table.column_names if column.lower() == name]
        if len(matches) > 1:
            raise InputError(
                f"data: expected one column {name!r}, found {' and '.join(map(repr, matches))}: the name is ambiguous; "
                "rename one of them"
            )
        if matches:
            return matches[0]
    return None


def missing_column_error(kind: str, names: tuple[str, ...], table: pa.Table, where: str) -> InputError:
    """Returns the error for a table without a column of this kind, which has none of the well-known names."""
    return InputError(
        f"{where}: no {kind} column: expected one of {', '.join(names)}, found {', '.join(table.column_names)}; "
        f"name it with --data.{kind}"
    )
