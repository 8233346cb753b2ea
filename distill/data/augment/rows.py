"""Synthetic rows from the rows of a split, in its own form, with tags and answers moved along."""

import hashlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from random import Random
from typing import Any, NamedTuple

from distill.data.augment.config import DRAWN
from distill.data.augment.kinds import Kind, SourceText
from distill.data.augment.words import (
    Words,
    join_words,
    split_answered,
    split_tagged,
    split_words,
)
from distill.data.rows.questions import Questions
from distill.data.rows.tagged import OUTSIDE, Tagged
from distill.data.sources.answer_cells import Answer
from distill.data.splits.examples import Examples

_ROUNDS = 2  # times that every kind is tried for a synthetic row before it is left out
_BEGINNING, _INNER = "B-", "I-"


class SyntheticRow(NamedTuple):
    """A synthetic row.

    Args:
        source: The number of the row that it was made from; for templates and n-grams, of a row of the same class.
        kind: How it was made.
        columns: The words of its text, and of its second text if it is a pair.
    """

    source: int
    kind: str
    columns: tuple[Words, ...]

    @property
    def text(self) -> str:
        """The text, of a pair both with a line break between them."""
        return "\n".join(map(join_words, self.columns))


def find_name_types(labels: Sequence[str]) -> dict[int, str]:
    """Returns tag id -> type for the tags of names: PER for B-PER and I-PER."""
    return {number: name[2:] for number, name in enumerate(labels) if name[:2] in (_BEGINNING, _INNER)}


def split_sources(part: Any, labels: Sequence[str]) -> list[tuple[SourceText, ...]]:
    """Returns the texts of each row of a split as words: one, or two of a pair.

    Args:
        part: `Examples`, `Tagged` or `Questions`.
        labels: The names of the labels.
    """
    if isinstance(part, Tagged):
        inner = frozenset(number for number, name in enumerate(labels) if name.startswith(_INNER))
        tags = part.labels or [[] for _ in part.texts]
        rows = (split_tagged(words, row_tags, inner) for words, row_tags in zip(part.texts, tags, strict=True))
        return [(SourceText(words, row, 0, None),) for row, words in enumerate(rows)]
    if isinstance(part, Questions):
        answers = part.labels or [[] for _ in part.texts]
        contexts = (
            split_answered(context, [(each.start, each.start + len(each.text)) for each in row_answers])
            for context, row_answers in zip(part.pairs, answers, strict=True)
        )
        return [
            (SourceText(split_words(question), row, 0, None), SourceText(context, row, 1, None))
            for row, (question, context) in enumerate(zip(part.texts, contexts, strict=True))
        ]
    classes = part.labels or [None] * len(part)
    first = [
        SourceText(split_words(text), row, 0, _as_class(label))
        for row, (text, label) in enumerate(zip(part.texts, classes, strict=True))
    ]
    if part.pairs is None:
        return [(each,) for each in first]
    return [
        (each, SourceText(split_words(text), each.row, 1, each.label))
        for each, text in zip(first, part.pairs, strict=True)
    ]


def _as_class(label: Any) -> Hashable:
    """Returns a class, or the set of several; None for a number."""
    return None if isinstance(label, float) else tuple(label) if isinstance(label, list) else label


def make_rows(
    rows: Sequence[tuple[SourceText, ...]],
    kinds: Mapping[str, Kind],
    times: int,
    seed: int,
    known: Iterable[str] = (),
    advance: Callable[[int], object] = lambda count: None,
) -> Iterator[SyntheticRow]:
    """Yields up to `times` synthetic rows for each row, each by a kind drawn for it, none of them twice.

    A kind that has nothing to change in a row is replaced by another. What is made from a row depends on the seed, its
    number and its text, and on the rows made before it only where they would be equal.

    Args:
        rows: The texts of each row.
        kinds: The kinds by name.
        times: Synthetic rows for each.
        seed: Seed of all choices.
        known: Texts that no synthetic row may equal, apart from those of `rows`.
        advance: Called with the number of rows that are done.
    """
    seen = {_hash_text("\n".join(join_words(source.words) for source in row)) for row in rows}
    seen |= {_hash_text(text) for text in known}
    for row in rows:
        for copy in range(times):
            rng = Random(f"{seed} {row[0].row} {copy}")  # noqa: S311
            synthetic = _make_row(row, kinds, rng, seen)
            if synthetic is not None:
                yield synthetic
        advance(1)


def _make_row(
    row: tuple[SourceText, ...], kinds: Mapping[str, Kind], rng: Random, seen: set[bytes]
) -> SyntheticRow | None:
    names = list(kinds)
    for _ in range(_ROUNDS):
        rng.shuffle(names)
        for name in names:
            changed = [kinds[name](source, rng) for source in row]
            if not any(changed):
                continue
            columns = tuple(new or source.words for new, source in zip(changed, row, strict=True))
            synthetic = SyntheticRow(row[0].row, name, columns)
            key = _hash_text(synthetic.text)
            if key not in seen:
                seen.add(key)
                return synthetic
    return None


def _hash_text(text: str) -> bytes:
    """Returns a hash that two texts share if they are the same but for blanks."""
    return hashlib.blake2b(" ".join(text.split()).encode(), digest_size=8).digest()


def build_part(part: Any, synthetic: Sequence[SyntheticRow], labels: Sequence[str], *, is_labelled: bool) -> Any:
    """Returns synthetic rows as a split of the same class as `part`.

    Args:
        part: The split that they were made from.
        synthetic: The rows.
        labels: The names of the labels.
        is_labelled: Whether they get the labels of their sources, with tags and answers where their words are now.
    """
    if isinstance(part, Tagged):
        words = [
            [f"{word.gap if index else ''}{word.text}" for index, word in enumerate(row.columns[0])]
            for row in synthetic
        ]
        return Tagged(words, [move_tags(row.columns[0], labels) for row in synthetic] if is_labelled else [])
    texts = [join_words(row.columns[0]) for row in synthetic]
    pairs = [join_words(row.columns[1]) for row in synthetic] if part.pairs is not None else None
    if isinstance(part, Questions):
        assert pairs is not None
        return Questions(texts, pairs, [_answer_row(part, row) for row in synthetic] if is_labelled else [])
    taken = [part.labels[row.source] for row in synthetic] if is_labelled and part.labels else []
    return Examples(texts, pairs, taken)


def _answer_row(part: Questions, row: SyntheticRow) -> list[Answer]:
    return move_answers(row.columns[1], part.labels[row.source], split_words(part.pairs[row.source]))


def move_tags(words: Words, labels: Sequence[str]) -> list[int]:
    """Returns the tag of each word; a word that was put in has the tag of words outside names.

    A name whose first word is gone begins with the next.
    """
    types = find_name_types(labels)
    first = {kind: labels.index(f"{_BEGINNING}{kind}") for kind in types.values() if f"{_BEGINNING}{kind}" in labels}
    outside = labels.index(OUTSIDE) if OUTSIDE in labels else 0
    tags: list[int] = []
    for word in words:
        tag = outside if word.tag is None else int(word.tag)
        kind = types.get(tag)
        last = types.get(tags[-1]) if tags else None
        if kind is not None and labels[tag].startswith(_INNER) and last != kind:
            tag = first.get(kind, tag)
        tags.append(tag)
    return tags


def move_answers(context: Words, answers: Sequence[Answer], original: Words) -> list[Answer]:
    """Returns the answers, without blanks around them, at the places of their words, which are fixed.

    Args:
        context: The words of the synthetic context.
        answers: The answers in the original context.
        original: Its words.
    """
    blanks = len(original[0].gap) if original else 0  # before the first word, which joined words begin with
    old, new = [blanks + start for start in _find_starts(original)], _find_starts(context)
    starts = {word.origin: start for word, start in zip(context, new, strict=True)}
    moved = []
    for answer in answers:
        start = answer.start + len(answer.text) - len(answer.text.lstrip())
        first = bisect_right(old, start) - 1
        moved.append(Answer(answer.text.strip(), starts[first] + start - old[first]))
    return moved


def _find_starts(words: Words) -> list[int]:
    """Returns the index of each word's first character in the joined text."""
    starts, end = [], 0
    for index, word in enumerate(words):
        starts.append(end + (len(word.gap) if index else 0))
        end = starts[-1] + len(word.text)
    return starts


def describe_rows(synthetic: Sequence[SyntheticRow], texts: Mapping[int, str]) -> list[str]:
    """Returns a sentence for each kind, with its count and an example.

    Args:
        synthetic: The synthetic rows.
        texts: Number of a row -> its text, of those that they were made from.
    """
    counts = Counter(row.kind for row in synthetic)
    shown = {row.kind: row for row in reversed(synthetic)}
    return [
        f"augment: {kind}: {count:,} rows, such as {shown[kind].text[:80]!r}"
        + ("" if kind in DRAWN else f" from {' '.join(texts[shown[kind].source].split())[:80]!r}")
        for kind, count in counts.items()
    ]
