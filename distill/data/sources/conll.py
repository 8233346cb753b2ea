"""CoNLL files: a word a line, its tag last, an empty line between sentences."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from distill.data.sources.files import read_utf8
from distill.errors import InputError

TABS, BLANKS = re.compile(r" *\t *"), re.compile(r"[ \t]+")
EMPTY = " \t\r"  # no other blank ends a cell: some are words


def read_conll(file: Path) -> pa.Table:
    """The file as a table of tokens and tags, a list of strings a row each; document marks are left out, and comments:
    lines with `#` before a sentence that don't read like those of words.

    Columns stand between tabs where the file has any, so that words may hold blanks; and between blanks and tabs where
    it has none, or most words would hold one.

    Raises:
        InputError: A line with more or fewer columns than most, such as one without a tag, a comment within a sentence,
            numbers in the place of words, or text that isn't UTF-8.
    """
    lines = read_utf8(file).split("\n")  # no other mark ends a line: some stand in words
    between = separator([line for line in lines if line.strip(EMPTY) and not line.startswith("#")])
    cut = [cells_of(line, between) for line in lines]
    columns, known = form_of([cells for cells, line in zip(cut, lines, strict=True) if not line.startswith("#")])
    sentences: list[list[tuple[str, str]]] = [[]]
    for number, (line, cells) in enumerate(zip(lines, cut, strict=True), 1):
        if not cells or is_mark(cells):
            if sentences[-1]:
                sentences.append([])
        elif line.startswith("#") and not sentences[-1] and (len(cells) != columns or cells[-1] not in known):
            continue
        elif line.startswith("#") and len(cells) != columns:
            raise InputError(
                f"data {str(file)!r}: line {number}: expected comments before a sentence, or the word # with "
                f"{columns} columns in all, found {line[:60]!r} within a sentence; an empty line ends a sentence"
            )
        elif len(cells) < 2 or len(cells) != columns or not cells[0] or not cells[-1]:
            raise InputError(
                f"data {str(file)!r}: line {number}: expected a word and its tag, in {max(columns, 2)} columns as most "
                f"lines are, found {line[:60]!r}: it can't be told which is the tag; an empty line ends a sentence"
            )
        else:
            sentences[-1].append((cells[0], cells[-1]))
    rows = [row for row in sentences if row]
    if any(len(row) > 1 for row in rows) and all(word == str(i) for row in rows for i, (word, _) in enumerate(row, 1)):
        raise InputError(
            f"data {str(file)!r}: expected words in the first column, found their numbers in every sentence: no "
            "word would be read; leave that column out"
        )
    strings = pa.list_(pa.string())
    return pa.table({
        "tokens": pa.array([[word for word, _ in row] for row in rows], strings),
        "tags": pa.array([[tag for _, tag in row] for row in rows], strings),
    })  # fmt: skip


def form_of(lines: Sequence[Sequence[str]]) -> tuple[int, set[str]]:
    """How many columns most words have, and their tags."""
    words = [cells for cells in lines if cells and not is_mark(cells)]
    counts = Counter(map(len, words)).most_common(1)
    return counts[0][0] if counts else 0, {cells[-1] for cells in words}


def cells_of(line: str, between: re.Pattern[str]) -> list[str]:
    """The cells of a line; none of an empty one."""
    whole = line.strip(EMPTY)
    return between.split(line.rstrip("\r").strip(" ") if between is TABS else whole) if whole else []


def separator(lines: Sequence[str]) -> re.Pattern[str]:
    """What stands between the columns of lines with words."""
    tabbed = [TABS.split(line.strip(EMPTY)) for line in lines if "\t" in line.strip(EMPTY)]
    spaced = sum(" " in cell for cells in tabbed for cell in cells[:1])
    return TABS if tabbed and 2 * spaced < len(tabbed) else BLANKS


def is_mark(cells: Sequence[str]) -> bool:
    return cells[0].split(" ")[0] == "-DOCSTART-"
