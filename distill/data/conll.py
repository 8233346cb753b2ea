"""CoNLL files: a word a line, its tag last, an empty line between sentences."""

from pathlib import Path

import pyarrow as pa

from distill.errors import InputError


def read_conll(file: Path) -> pa.Table:
    """The file as a table of tokens and tags, a list of strings a row each; comments and document marks are left out.

    Raises:
        InputError: A line without a tag, or text that isn't UTF-8.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise InputError(f"data {str(file)!r}: not a CoNLL file in UTF-8: {error}") from error
    sentences: list[list[tuple[str, str]]] = [[]]
    for number, line in enumerate(lines, 1):
        cells = line.split()
        if not cells or cells[0] == "-DOCSTART-" or line.startswith("# "):
            if sentences[-1]:
                sentences.append([])
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
