"""Damage that is put into clean rows on purpose: typos, wrong encodings, near duplicates and wrong labels."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from distill.data.augment.noise import mistype

FILLERS = ("please", "thanks", "hi", "hello", "ok", "so", "well", "now")
_WORD = re.compile(r"(?<![\w'])[A-Za-z]{4,}(?![\w'])")


@dataclass(frozen=True)
class Shares:
    """How much is damaged.

    Args:
        typos: Of all words.
        encodings: Of rows.
        copies: Near duplicates, of rows; they are added.
        labels: Of rows, including the added ones.
    """

    typos: float = 0.1
    encodings: float = 0.1
    copies: float = 0.2
    labels: float = 0.1


@dataclass
class DamagedRow:
    """A row and what was done to it.

    Args:
        text: The damaged text.
        label: The label, perhaps a wrong one.
        original: The text before.
        source: Number of the clean row that it was made from.
        is_copy: Whether it was added beside that row.
        is_mislabelled: Whether the label is wrong.
        is_wrongly_decoded: Whether it was decoded in the wrong encoding.
        typos: Word as it should be -> as it is, in the order of the text.
    """

    text: str
    label: str
    original: str
    source: int
    is_copy: bool = False
    is_mislabelled: bool = False
    is_wrongly_decoded: bool = False
    typos: list[tuple[str, str]] = field(default_factory=list)


def damage_rows(texts: Sequence[str], labels: Sequence[str], shares: Shares, seed: int) -> list[DamagedRow]:
    """Returns damaged rows in random order, the added ones among them."""
    rng = random.Random(seed)  # noqa: S311
    rows = [DamagedRow(text, label, text, row) for row, (text, label) in enumerate(zip(texts, labels, strict=True))]
    for row in rng.sample(range(len(rows)), round(shares.copies * len(rows))):
        copy = make_copy(rows[row].text, rng)
        rows.append(DamagedRow(copy, labels[row], copy, row, is_copy=True))
    words = sum(len(row.text.split()) for row in rows)
    candidates = [(number, each.span()) for number, row in enumerate(rows) for each in _WORD.finditer(row.text)]
    chosen = rng.sample(candidates, min(len(candidates), round(shares.typos * words)))
    for number, (start, end) in sorted(chosen, reverse=True):
        row = rows[number]
        typo = mistype(row.text[start:end], rng)
        if typo and typo != row.text[start:end]:
            row.typos.insert(0, (row.text[start:end], typo))
            row.text = row.text[:start] + typo + row.text[end:]
    names = sorted(set(labels))
    for row in rng.sample(rows, round(shares.labels * len(rows))):
        row.label, row.is_mislabelled = rng.choice([name for name in names if name != row.label]), True
    for row in rng.sample(rows, round(shares.encodings * len(rows))):
        row.original, row.text = add_typography(row.original), decode_wrongly(add_typography(row.text))
        row.is_wrongly_decoded = True
    rng.shuffle(rows)
    return rows


def make_copy(text: str, rng: random.Random) -> str:
    """Returns a near duplicate: other case or punctuation, and a filler at one end."""
    changed = rng.choice((text.lower(), text.rstrip("?.!"), text.upper() if len(text) < 40 else text, text + "!"))
    filler = rng.choice(FILLERS)
    return rng.choice((f"{filler} {changed}", f"{changed} {filler}", changed))


def add_typography(text: str) -> str:
    """Returns the text with curly apostrophes, or with an ellipsis at its end if it has none."""
    return text.replace("'", "’") if "'" in text else f"{text}…"


def decode_wrongly(text: str) -> str:
    """Returns the text as it looks if its UTF-8 is taken for Windows-1252."""
    return text.encode("utf-8").decode("cp1252", errors="replace")
