"""Reader of CoNLL files: one word per line with its tag last, and an empty line between sentences."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from distill.data.sources.files import read_utf8
from distill.errors import InputError

TABS, BLANKS = re.compile(r" *\t *"), re.compile(r"[ \t]+")
EMPTY = " \t\r"  # other whitespace characters don't separate cells: they can be words


def read_conll(file: Path) -> pa.Table:
    """Returns the file as a table of tokens and tags, each a list of strings per row.

    Document marks and comments are left out; a comment is a line that starts with `#` before a sentence and does not
    have the columns and a known tag of a word. Columns are separated by tabs if the file has any, so that words may
    contain blanks; and by blanks and tabs if it has none, or if most words would otherwise contain a blank.

    Raises:
        InputError: A line has more or fewer columns than most, for example no tag, a comment is within a sentence, the
            first column contains numbers instead of words, or the text is not UTF-8.
    """
    lines = read_utf8(file).split("\n")  # not splitlines(): other line separators can occur in words
    separator = _find_separator([line for line in lines if line.strip(EMPTY) and not line.startswith("#")])
    split = [_split_cells(line, separator) for line in lines]
    columns, tags = _find_columns([cells for cells, line in zip(split, lines, strict=True) if not line.startswith("#")])
    sentences: list[list[tuple[str, str]]] = [[]]
    for number, (line, cells) in enumerate(zip(lines, split, strict=True), 1):
        if not cells or _is_document_mark(cells):
            if sentences[-1]:
                sentences.append([])
        elif line.startswith("#") and not sentences[-1] and (len(cells) != columns or cells[-1] not in tags):
            continue
        elif line.startswith("#") and len(cells) != columns:
            raise InputError(
                f"data {str(file)!r}: line {number}: expected comments before a sentence, or the word # with "
                f"{columns} columns in all, found {line[:60]!r} within a sentence; an empty line ends a sentence"
            )
        elif len(cells) < 2 or len(cells) != columns or not cells[0] or not cells[-1]:
            raise InputError(
                f"data {str(file)!r}: line {number}: expected a word and its tag, in {max(columns, 2)} columns as most "
                f"lines are, found {line[:60]!r}: the position of the tag is unknown; an empty line ends a sentence"
            )
        else:
            sentences[-1].append((cells[0], cells[-1]))
    rows = [row for row in sentences if row]
    if any(len(row) > 1 for row in rows) and all(word == str(i) for row in rows for i, (word, _) in enumerate(row, 1)):
        raise InputError(
            f"data {str(file)!r}: expected words in the first column, found their numbers in every sentence: the "
            "numbers would be taken for words; leave that column out"
        )
    strings = pa.list_(pa.string())
    return pa.table({
        "tokens": pa.array([[word for word, _ in row] for row in rows], strings),
        "tags": pa.array([[tag for _, tag in row] for row in rows], strings),
    })  # fmt: skip


def _find_columns(lines: Sequence[Sequence[str]]) -> tuple[int, set[str]]:
    """Returns the most common number of columns, and the set of all tags."""
    rows = [cells for cells in lines if cells and not _is_document_mark(cells)]
    counts = Counter(map(len, rows)).most_common(1)
    return counts[0][0] if counts else 0, {cells[-1] for cells in rows}


def _split_cells(line: str, separator: re.Pattern[str]) -> list[str]:
    """Returns the cells of a line; none for an empty line."""
    stripped = line.strip(EMPTY)
    return separator.split(line.rstrip("\r").strip(" ") if separator is TABS else stripped) if stripped else []


def _find_separator(lines: Sequence[str]) -> re.Pattern[str]:
    """Returns the separator between the columns of lines with words."""
    tabbed = [TABS.split(line.strip(EMPTY)) for line in lines if "\t" in line.strip(EMPTY)]
    with_blank = sum(" " in cell for cells in tabbed for cell in cells[:1])
    return TABS if tabbed and 2 * with_blank < len(tabbed) else BLANKS


def _is_document_mark(cells: Sequence[str]) -> bool:
    return cells[0].split(" ")[0] == "-DOCSTART-"
