"""Rows as words that keep their origin, their tag and the blanks before them while they are changed and moved."""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

# A word keeps its apostrophes and hyphens; a number its decimal point and separators; a mark is a word of its own.
_WORD = re.compile(r"(\s*)(\d+(?:[.,:/]\d+)+|\w+(?:['’\-]\w+)*|[^\w\s])")
INSERTED = -1


class RowWord(NamedTuple):
    """A word of a row.

    Args:
        text: The word, without blanks.
        gap: The blanks before it.
        origin: Its number in the original row; INSERTED if it isn't from there.
        tag: The id of its tag in a tagged row; None without tags, and for an inserted word.
        unit: Words next to each other with the same number are moved and removed together, such as those of a name.
        is_fixed: Whether the word has to stay as it is, although it may move: those of an answer.
    """

    text: str
    gap: str = ""
    origin: int = INSERTED
    tag: Any = None
    unit: int = INSERTED
    is_fixed: bool = False


Words = list[RowWord]


def split_words(text: str) -> Words:
    """Returns the words of a text; `join_words` restores it, but for blanks at its end."""
    return [RowWord(match[2], match[1], number, unit=number) for number, match in enumerate(_WORD.finditer(text))]


def split_answered(text: str, spans: Iterable[tuple[int, int]]) -> Words:
    """Returns the words of a text in which the words of each (start, end) span are fixed and one unit."""
    spans = list(spans)
    words: Words = []
    for number, match in enumerate(_WORD.finditer(text)):
        start, end = match.span(2)
        inside = any(start < last and first < end for first, last in spans)
        unit = words[-1].unit if inside and words and words[-1].is_fixed else number
        words.append(RowWord(match[2], match[1], number, unit=unit, is_fixed=inside))
    return words


def split_tagged(texts: Sequence[str], tags: Sequence[int], inner: frozenset[int]) -> Words:
    """Returns the words of a tagged row.

    Args:
        texts: The words, with the blanks before them.
        tags: The id of each word's tag; none in a row without tags.
        inner: The ids of tags that continue a name (I-…), whose words are a unit with those before them.
    """
    words: Words = []
    for number, text in enumerate(texts):
        bare = text.lstrip()
        tag = tags[number] if tags else None
        unit = words[-1].unit if words and tag in inner else number
        words.append(RowWord(bare, text[: len(text) - len(bare)], number, tag, unit))
    return words


def join_words(words: Sequence[RowWord]) -> str:
    """Returns the text of the words, with the blanks between them."""
    return "".join(f"{word.gap}{word.text}" for word in words).strip()


def iterate_units(words: Sequence[RowWord]) -> Iterator[Words]:
    """Yields the words that move together."""
    for _, unit in groupby(words, key=lambda word: word.unit if word.unit != INSERTED else object()):
        yield list(unit)


def order_units(units: Sequence[Words], gaps: Sequence[str]) -> Words:
    """Returns the words of the units in their order, with `gaps` before the units."""
    return [
        word._replace(gap=gap) if index == 0 else word
        for unit, gap in zip(units, gaps, strict=True)
        for index, word in enumerate(unit)
    ]


def is_mark(word: RowWord) -> bool:
    """Returns whether the word is a punctuation mark or another symbol."""
    return not any(letter.isalnum() for letter in word.text)


def match_case(new: str, old: str) -> str:
    """Returns `new` with the case of `old`: all capitals, a capital at the start, or as it is."""
    if old.isupper() and len(old) > 1:
        return new.upper()
    return new[:1].upper() + new[1:] if old[:1].isupper() else new
