"""Rows drawn from a model of word sequences of each class."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from random import Random

from distill.data.augment.words import INSERTED, RowWord, Words

_LONG = 0.8  # probability of continuing after two words and not after one, where both are known
_LONGEST = 1.5  # rows are drawn up to so many times the length of the longest of the class
NgramContext = tuple[str, ...]


@dataclass(frozen=True)
class NgramModel:
    """Which words follow one and two words in the rows of a class, as often as they do; None is the end of a row.

    A row is drawn word by word: after the last two words with probability 0.8, after the last one otherwise.
    """

    followers: dict[NgramContext, list[RowWord | None]]
    longest: int

    @classmethod
    def count(cls, rows: Iterable[Words]) -> "NgramModel":
        """Returns the model of rows."""
        followers: dict[NgramContext, list[RowWord | None]] = {}
        longest = 0
        for words in rows:
            longest = max(longest, len(words))
            last: NgramContext = ("", "")
            for word in (*words, None):
                for context in (last, last[1:]):
                    followers.setdefault(context, []).append(word)
                last = (last[1], word.text.lower() if word else "")
        return cls(followers, longest)

    def draw(self, rng: Random) -> Words | None:
        """Returns a row; None if it doesn't end in time."""
        last: NgramContext = ("", "")
        words: Words = []
        for _ in range(int(_LONGEST * self.longest) + 1):
            context = last if rng.random() < _LONG or not words else last[1:]
            word = rng.choice(self.followers[context])
            if word is None:
                return words
            words.append(word._replace(origin=INSERTED, unit=INSERTED, gap=word.gap if words else ""))
            last = (last[1], word.text.lower())
        return None


def count_ngrams(rows: Iterable[tuple[Words, Hashable]]) -> dict[Hashable, NgramModel]:
    """Returns a model of the rows of each class; rows are given with their classes."""
    by_class: dict[Hashable, list[Words]] = {}
    for words, label in rows:
        by_class.setdefault(label, []).append(words)
    return {label: NgramModel.count(each) for label, each in by_class.items()}
