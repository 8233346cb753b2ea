"""Parsing of table cells: lists and numbers, also as text, the only type that csv and jsonl readers return."""

import ast
import io
import json
import math
import re
import tokenize
from collections.abc import Sequence
from typing import Any

from distill.errors import InputError

_NUMBER = re.compile(r"\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*")
ZEROS, ONES = ("0", "0.0", "False"), ("1", "1.0", "True")
BRACKETS = re.compile(r"\s*\[.*\]\s*", re.DOTALL)


def parse_literal(cell: str) -> Any:
    """Parses a cell as JSON, or as a Python literal, the syntax in which pandas writes lists to csv.

    Raises:
        ValueError: The cell is neither.
    """
    try:
        return json.loads(cell)
    except (ValueError, RecursionError):
        pass
    try:
        kinds = [each.type for each in tokenize.generate_tokens(io.StringIO(cell.strip()).readline)]
        kinds = [kind for kind in kinds if kind != tokenize.NL]
        # Python concatenates adjacent string literals, and NumPy arrays are printed without commas.
        if (tokenize.STRING, tokenize.STRING) in zip(kinds, kinds[1:], strict=False):
            raise ValueError("strings without a comma between them")
        return ast.literal_eval(cell.strip())
    except (SyntaxError, tokenize.TokenError, RecursionError, MemoryError) as error:
        raise ValueError(str(error)) from error


def parse_list(cell: object) -> list[Any] | None:
    """Returns the list that a cell is or that its text represents, see `parse_literal`; None if it is not a list."""
    if isinstance(cell, list):
        return cell
    if not isinstance(cell, str) or not BRACKETS.fullmatch(cell):
        return None
    try:
        value = parse_literal(cell)
    except ValueError:
        return None
    return value if isinstance(value, list) else None


def is_bracketed(cell: str) -> bool:
    """Returns whether the text looks like a list.

    It then has brackets around all of it, and its first word is neither `[` nor contains `]`.
    """
    words = cell.split()
    return bool(BRACKETS.fullmatch(cell)) and words[0] != "[" and "]" not in words[0]


def hold_lists(cells: Sequence[object]) -> bool:
    """Returns whether at least one cell is not empty and all such cells are lists."""
    filled = [cell for cell in cells if cell is not None and cell != ""]
    return bool(filled) and all(parse_list(cell) is not None for cell in filled)


def hold_numbers(cells: Sequence[object]) -> bool:
    """Returns whether at least one cell is not empty and all such cells are numbers."""
    filled = [cell for cell in cells if cell is not None and cell != ""]
    return bool(filled) and all(is_number(cell) for cell in filled)


def hold_fractions(cells: Sequence[Any]) -> bool:
    """Returns whether all cells that are not empty are numbers, at least one of them a fraction."""
    filled = [cell for cell in cells if cell is not None and cell != ""]
    return all(is_number(cell) for cell in filled) and any(float(cell) % 1 for cell in filled)


def is_number(cell: object) -> bool:
    """Returns whether a cell is a number; text only if it is written in digits: `nan` and `inf` may be names."""
    if isinstance(cell, str):
        return bool(_NUMBER.fullmatch(cell)) and math.isfinite(float(cell))
    return isinstance(cell, (int, float)) and not isinstance(cell, bool)


def parse_labels(cell: object, where: str) -> list[str]:
    """Parses the labels in a cell: a list, JSON of one, or names between `|` or `;`; sorted, each once.

    Raises:
        InputError: The cell looks like a list but can't be parsed, or an element is null or nested.
    """
    if cell is None:
        return []
    names = parse_list(cell)
    if names is None and isinstance(cell, str):
        if BRACKETS.fullmatch(cell):
            raise InputError(
                f"{where}: expected labels as a list in JSON, or between | or ;, found {cell[:60]!r}: all of it would "
                "be taken for one label"
            )
        names = re.split(r"[|;]", cell)
    if any(name is None or isinstance(name, (list, dict)) for name in names or ()):
        raise InputError(
            f"{where}: expected names of labels, found {str(cell)[:60]!r}: its written form would be taken for a label"
        )
    return sorted({str(name).strip() for name in ([cell] if names is None else names)} - {""})


def parse_number(cell: Any, where: str) -> float:
    """Parses a number.

    Raises:
        InputError: The cell is not a finite number.
    """
    try:
        number = float(cell)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise InputError(f"{where}: expected a number, found {cell!r}: the model predicts numbers")
    return number


def find_multi_hot_width(cells: Sequence[object]) -> int:
    """Returns the number of labels if every cell is a list with a 0 or 1 for each of them, else 0."""
    rows = [parse_list(cell) for cell in cells if cell is not None and cell != ""]
    widths = {len(row) if row else 0 for row in rows}
    if len(widths) != 1 or min(widths) < 2:
        return 0
    return widths.pop() if all(str(value) in ZEROS + ONES for row in rows for value in row or ()) else 0


def parse_multi_hot(cell: object, where: str, width: int) -> list[str]:
    """Returns the positions with a 1; none for an empty cell.

    Raises:
        InputError: The cell is not a list with a 0 or 1 for each of `width` labels.
    """
    if cell is None or cell == "" or parse_list(cell) == []:
        return []
    values = [str(value) for value in parse_list(cell) or ()]
    if len(values) != width or not set(values) <= {*ZEROS, *ONES}:
        raise InputError(
            f"{where}: expected a 0 or 1 for each of {width} labels, as in train, found {str(cell)[:60]!r}: the labels "
            "of the row are unknown"
        )
    return [str(i) for i, value in enumerate(values) if value in ONES]
