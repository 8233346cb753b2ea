"""Correction of misspelt words by a dictionary that is built from the data, a word list and words that are given."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

from distill.data.text_files import read_text_file
from distill.errors import InputError

VERSION = 1  # part of stage keys; bump it when the same texts are corrected differently
WORD = re.compile(r"(?<![\w@#&/.-])[^\W\d_]+(?:['’][^\W\d_]+)*(?![\w@/])")
SHORTEST = 3  # letters of a word that is corrected
FREQUENT = 5  # occurrences from which on an unlisted word of the data counts as known
RATIO = 10  # times as frequent as a frequent word is its correction
LEAD = 3  # times as probable as the next candidate is a correction
COMMON = 1_000_000  # occurrences in the list from which on a listed word of few letters counts; hae and comr are rare
FEW_LETTERS = 5
OFTEN = 10  # occurrences of a pair that support a word of few letters
CANDIDATES = 8  # at most, of a word
_UNSEEN = 0.5  # occurrences of a listed word that the data lacks
_UNSEEN_SHARE = 0.001  # of a word's occurrences, for a neighbor that the data lacks beside it

Pair = tuple[str, str]


@dataclass(frozen=True)
class Dictionary:
    """Known words and the pairs in which words occur, in lower case.

    Args:
        counts: Word -> occurrences in the data, of all words of the data.
        pairs: Two adjacent words -> occurrences in the data.
        listed: Words that are right wherever they occur.
    """

    counts: Mapping[str, int]
    pairs: Mapping[Pair, int]
    listed: frozenset[str]

    def is_form(self, word: str) -> bool:
        """Returns whether the word is a listed one with an ending after an apostrophe, such as card's."""
        stem, apostrophe, _ = word.rpartition("'")
        return bool(apostrophe) and stem in self.listed

    @staticmethod
    def build(texts: Iterable[str], listed: Iterable[str]) -> "Dictionary":
        """Counts the words of texts, and their pairs."""
        counts: Counter[str] = Counter()
        pairs: Counter[Pair] = Counter()
        for text in texts:
            words = [_fold(word) for word in WORD.findall(text)]
            counts.update(words)
            pairs.update(pairwise(words))
        return Dictionary(counts, pairs, frozenset(map(_fold, listed)))


def _fold(word: str) -> str:
    return word.lower().replace("’", "'")


def read_english_words() -> set[str]:
    """Returns the English words of symspellpy's list, of few letters only common ones.

    Raises:
        InputError: symspellpy isn't installed.
    """
    load_symspell()
    source = files("symspellpy") / "frequency_dictionary_en_82_765.txt"
    entries = (line.split(" ") for line in source.read_text("utf-8-sig").splitlines() if line)
    return {word for word, count in entries if len(word) > FEW_LETTERS or int(count) >= COMMON}


def read_known_words(file: Path) -> set[str]:
    """Returns the words of a user's file.

    Raises:
        InputError: The file is missing, or not in UTF-8.
    """
    return set(read_text_file(file, "clean.words", "its words would be corrected like others").split())


def load_symspell() -> Any:
    """Returns the class SymSpell.

    Raises:
        InputError: symspellpy isn't installed.
    """
    try:
        from symspellpy import SymSpell
    except ImportError as error:
        raise InputError(
            "data.clean: step spelling: expected the package symspellpy, found none: words can't be corrected; install "
            "it with pip install -e '.[clean]'"
        ) from error
    return SymSpell


def find_candidates(dictionary: Dictionary, edits: int = 1) -> dict[str, list[str]]:
    """Returns word -> what it may be a misspelling of, for the unknown words of the data.

    A word is known if it is listed, or frequent and no other word is RATIO times as frequent and few edits away.
    Candidates are the known words with the fewest edits. Source: Garbe 2012, SymSpell (candidates by deletions).

    Args:
        dictionary: The words.
        edits: Insertions, deletions, replacements and swaps of neighbors that a correction may take.
    """
    from symspellpy import Verbosity

    counts, listed = dictionary.counts, dictionary.listed
    speller = load_symspell()(max_dictionary_edit_distance=edits)
    for word in listed | {word for word, count in counts.items() if count >= FREQUENT}:
        speller.create_dictionary_entry(word, 1 + counts.get(word, 0))

    def look_up(word: str, least: int) -> list[str]:
        suggestions = [
            each for each in speller.lookup(word, Verbosity.ALL, max_edit_distance=edits) if each.term != word
        ]
        suggestions = [each for each in suggestions if each.count > least]
        nearest = sorted(
            (each for each in suggestions if each.distance == suggestions[0].distance), key=lambda each: -each.count
        )
        return [str(each.term) for each in nearest[:CANDIDATES]]

    unlisted = [
        word for word in counts if len(word) >= SHORTEST and word not in listed and not dictionary.is_form(word)
    ]
    frequent = {word: look_up(word, RATIO * counts[word]) for word in unlisted if counts[word] >= FREQUENT}
    frequent = {word: candidates for word, candidates in frequent.items() if candidates}
    for word in frequent:
        speller.delete_dictionary_entry(word)
    rare = {word: look_up(word, 0) for word in unlisted if counts[word] < FREQUENT}
    return frequent | {word: candidates for word, candidates in rare.items() if candidates}


@dataclass(frozen=True)
class Speller:
    """Replaces unknown words by the candidate that fits best between its neighbors, if it fits far better than others.

    Args:
        candidates: Unknown word -> candidates, in lower case.
        counts: Word -> occurrences in the data.
        pairs: Two adjacent words -> occurrences in the data.
    """

    candidates: Mapping[str, Sequence[str]]
    counts: Mapping[str, int]
    pairs: Mapping[Pair, int]

    @staticmethod
    def build(dictionary: Dictionary, edits: int = 1) -> "Speller":
        """Returns the speller for a dictionary, with the counts that it needs."""
        candidates = find_candidates(dictionary, edits)
        used = {each for suggestions in candidates.values() for each in suggestions}
        pairs = {pair: count for pair, count in dictionary.pairs.items() if not used.isdisjoint(pair)}
        return Speller(candidates, {word: dictionary.counts.get(word, 0) for word in used}, pairs)

    def correct(self, text: str) -> str:
        """Returns the text with its misspelt words corrected; words in capitals and with digits stay."""
        matches = list(WORD.finditer(text))
        words = [_fold(each[0]) for each in matches]
        if self.candidates.keys().isdisjoint(words):
            return text
        pieces, end = [], 0
        for number, each in enumerate(matches):
            best = self._choose(words, number)
            pieces += [text[end : each.start()], each[0] if best is None else _copy_case(best, each[0])]
            end = each.end()
        return "".join([*pieces, text[end:]])

    def _choose(self, words: Sequence[str], number: int) -> str | None:
        """Returns the correction of a word between its neighbors; None if it stays."""
        candidates = self.candidates.get(words[number], ())
        before, after = words[number - 1] if number else "", words[number + 1] if number + 1 < len(words) else ""
        if len(words[number]) < FEW_LETTERS:
            candidates = [each for each in candidates if self._is_supported(before, each, after)]
        if len(candidates) < 2:
            return candidates[0] if candidates else None
        scored = sorted(((self._weigh(before, each, after), each) for each in candidates), reverse=True)
        return scored[0][1] if scored[0][0] >= LEAD * scored[1][0] else None

    def _weigh(self, before: str, word: str, after: str) -> float:
        """Returns the probability of a word between its neighbors, up to a factor."""
        count = self.counts[word] + _UNSEEN
        shares = (self.pairs.get(pair, 0) / count + _UNSEEN_SHARE for pair in ((before, word), (word, after)))
        return count * prod(shares)

    def _is_supported(self, before: str, word: str, after: str) -> bool:
        """Returns whether the data has a word beside each of its neighbors, or often beside one of them."""
        counts = [self.pairs.get(pair, 0) for pair in ((before, word), (word, after)) if all(pair)]
        return bool(counts) and (all(counts) or max(counts) >= OFTEN)


def _copy_case(word: str, pattern: str) -> str:
    """Returns the word with the capitals of a pattern: all of them, the first one, or none."""
    if pattern.isupper() and len(pattern) > 1:
        return word.upper()
    return word.capitalize() if pattern[0].isupper() else word
