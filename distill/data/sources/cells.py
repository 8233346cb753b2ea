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

NUMBER = re.compile(r"\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*")
COLD, HOT = ("0", "0.0", "False"), ("1", "1.0", "True")
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


def list_in(cell: object) -> list[Any] | None:
    """Returns the list that a cell is or that its text represents, see `parse_literal`; None if it is not a list."""
    if isinstance(cell, list):
        return cell
    if not isinstance(cell, str) or not BRACKETS.fullmatch(cell):
        return None
    try:
        found = parse_literal(cell)
    except ValueError:
        return None
    return found if isinstance(found, list) else None


def is_bracketed(cell: str) -> bool:
    """Returns whether the text looks like a list: brackets around all of it, and its first word is neither `[` nor
    contains `]`.
    """
    words = cell.split()
    return bool(BRACKETS.fullmatch(cell)) and words[0] != "[" and "]" not in words[0]


def hold_lists(cells: Sequence[object]) -> bool:
    """Returns whether at least one cell is not empty and all such cells are lists."""
    some = [cell for cell in cells if cell is not None and cell != ""]
    return bool(some) and all(list_in(cell) is not None for cell in some)


def hold_numbers(cells: Sequence[object]) -> bool:
    """Returns whether at least one cell is not empty and all such cells are numbers."""
    some = [cell for cell in cells if cell is not None and cell != ""]
    return bool(some) and all(is_number(cell) for cell in some)


def hold_fractions(cells: Sequence[Any]) -> bool:
    """Returns whether all cells that are not empty are numbers, at least one of them a fraction."""
    some = [cell for cell in cells if cell is not None and cell != ""]
    return all(is_number(cell) for cell in some) and any(float(cell) % 1 for cell in some)


def is_number(cell: object) -> bool:
    """Returns whether a cell is a number; text only if it is written in digits: `nan` and `inf` may be names."""
    if isinstance(cell, str):
        return bool(NUMBER.fullmatch(cell)) and math.isfinite(float(cell))
    return isinstance(cell, (int, float)) and not isinstance(cell, bool)


def several_labels(cell: object, where: str) -> list[str]:
    if cell is None:
        return []
    names = list_in(cell)
    if names is None and isinstance(cell, str):
        if BRACKETS.fullmatch(cell):
            raise InputError(
                f"{where}: expected labels as a list in JSON, or between | or ;, found {cell[:60]!r}: it would be one"
            )
        names = re.split(r"[|;]", cell)
    if any(name is None or isinstance(name, (list, dict)) for name in names or ()):
        raise InputError(f"{where}: expected names of labels, found {str(cell)[:60]!r}: what is no name would be one")
    return sorted({str(name).strip() for name in ([cell] if names is None else names)} - {""})


def a_number(cell: Any, where: str) -> float:
    try:
        found = float(cell)
    except (TypeError, ValueError):
        found = math.nan
    if not math.isfinite(found):
        raise InputError(f"{where}: expected a number, found {cell!r}: the model is to predict one")
    return found


def hot_width(cells: Sequence[object]) -> int:
    """Returns the number of labels if every cell is a list with a 0 or 1 for each of them, else 0."""
    rows = [list_in(cell) for cell in cells if cell is not None and cell != ""]
    widths = {len(row) if row else 0 for row in rows}
    hot = len(widths) == 1 and min(widths) > 1 and all(str(each) in COLD + HOT for row in rows for each in row or ())
    return widths.pop() if hot else 0


def hot_labels(cell: object, where: str, width: int) -> list[str]:
    """Returns the positions with a 1; none for an empty cell.

    Raises:
        InputError: The cell is not a list with a 0 or 1 for each of `width` labels.
    """
    if cell is None or cell == "" or list_in(cell) == []:
        return []
    row = [str(each) for each in list_in(cell) or ()]
    if len(row) != width or not set(row) <= {*COLD, *HOT}:
        raise InputError(
            f"{where}: expected a 0 or 1 for each of {width} labels, as in train, found {str(cell)[:60]!r}: it "
            "can't be told which of them hold"
        )
    return [str(i) for i, each in enumerate(row) if each in HOT]
