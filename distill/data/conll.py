"""CoNLL files: a word a line, its tag last, an empty line between sentences."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from distill.errors import InputError


def read_conll(file: Path) -> pa.Table:
    """The file as a table of tokens and tags, a list of strings a row each; document marks are left out, and comments:
    lines with `#` before a sentence that don't read like those of words.

    Raises:
        InputError: A line without a tag, a comment within a sentence, or text that isn't UTF-8.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise InputError(f"data {str(file)!r}: not a CoNLL file in UTF-8: {error}") from error
    columns, known = form_of([line.split() for line in lines if not line.startswith("#")])
    sentences: list[list[tuple[str, str]]] = [[]]
    for number, line in enumerate(lines, 1):
        cells = line.split()
        if not cells or cells[0] == "-DOCSTART-":
            if sentences[-1]:
                sentences.append([])
        elif line.startswith("#") and not sentences[-1] and (len(cells) != columns or cells[-1] not in known):
            continue
        elif line.startswith("#") and len(cells) != columns:
            raise InputError(
                f"data {str(file)!r}: line {number}: expected comments before a sentence, or the word # with "
                f"{columns} columns in all, found {line[:60]!r} within a sentence; an empty line ends a sentence"
            )
        elif len(cells) < 2:
            raise InputError(
                f"data {str(file)!r}: line {number}: expected a word and its tag, found {line!r}; an empty line ends a "
                "sentence"
            )
        else:
            sentences[-1].append((cells[0], cells[-1]))
    rows = [row for row in sentences if row]
    strings = pa.list_(pa.string())
    return pa.table({
        "tokens": pa.array([[word for word, _ in row] for row in rows], strings),
        "tags": pa.array([[tag for _, tag in row] for row in rows], strings),
    })  # fmt: skip


def form_of(lines: Sequence[Sequence[str]]) -> tuple[int, set[str]]:
    """How many columns most words have, and their tags."""
    words = [cells for cells in lines if cells and cells[0] != "-DOCSTART-"]
    counts = Counter(map(len, words)).most_common(1)
    return counts[0][0] if counts else 0, {cells[-1] for cells in words}
