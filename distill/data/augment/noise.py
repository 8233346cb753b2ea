"""Noise: typing and OCR errors, other case and punctuation, words left out or put in.

Each function returns changed words, or None where it can't change anything. Words, or units of them, are drawn with the
probability `rate`, and at least one is.

Source:
    Wei and Zou, "EDA: Easy Data Augmentation Techniques for Boosting Performance on Text Classification Tasks"
    (EMNLP-IJCNLP 2019), section 2, for words that are left out, put in and swapped. Words that are put in come from
    other rows and not from a thesaurus.
"""

from collections.abc import Callable, Sequence
from random import Random
from typing import TypeVar

from distill.data.augment.words import RowWord, Words, is_mark, iterate_units

_Item = TypeVar("_Item")
_ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
_KEY_POSITIONS = {letter: (row, column) for row, keys in enumerate(_ROWS) for column, letter in enumerate(keys)}
NEIGHBORS = {
    letter: "".join(
        other
        for other, (row, column) in _KEY_POSITIONS.items()
        if other != letter and abs(row - position[0]) <= 1 and abs(column - position[1]) <= 1
    )
    for letter, position in _KEY_POSITIONS.items()
}
# What character recognition confuses, each in both directions.
_CONFUSED = (("rn", "m"), ("cl", "d"), ("vv", "w"), ("l", "1"), ("I", "l"), ("O", "0"), ("S", "5"), ("B", "8"),
             ("e", "c"), ("h", "b"), ("u", "n"), ("t", "f"), ("g", "q"), ("Z", "2"))  # fmt: skip
CONFUSIONS = (*_CONFUSED, *(pair[::-1] for pair in _CONFUSED))
_SHORTEST = 3  # letters of a word that gets a typing error
_LONGEST_PHRASE = 3  # words that are put in together


def draw_some(items: Sequence[_Item], rate: float, rng: Random) -> list[_Item]:
    """Returns each of the items with probability `rate`, but at least one of them if there is any."""
    drawn = [item for item in items if rng.random() < rate]
    return drawn or ([rng.choice(items)] if items else [])


def change_words(words: Words, rate: float, rng: Random, change: Callable[[str, Random], str | None]) -> Words | None:
    """Returns the words with drawn ones replaced by what `change` returns; None if it changes none of them."""
    open_indices = [index for index, word in enumerate(words) if not word.is_fixed]
    changed = list(words)
    for index in draw_some(open_indices, rate, rng):
        new = change(words[index].text, rng)
        changed[index] = words[index]._replace(text=new) if new else words[index]
    return changed if changed != words else None


def add_keyboard_typos(words: Words, rate: float, rng: Random) -> Words | None:
    """Adds typing errors: a neighboring key, a letter left out or typed twice, or two letters exchanged."""
    return change_words(words, rate, rng, mistype)


def mistype(word: str, rng: Random) -> str | None:
    """Returns the word with a typing error; None for a number, a mark or a short word."""
    if len(word) < _SHORTEST or not word.isalpha():
        return None
    index = rng.randrange(len(word))
    letter, kind = word[index], rng.randrange(4)
    if kind == 0 and letter.lower() in NEIGHBORS:
        key = rng.choice(NEIGHBORS[letter.lower()])
        return word[:index] + (key.upper() if letter.isupper() else key) + word[index + 1 :]
    if kind == 1:
        return word[:index] + word[index + 1 :]
    if kind == 2:
        return word[:index] + letter + word[index:]
    index = min(index, len(word) - 2)
    return word[:index] + word[index + 1] + word[index] + word[index + 2 :]


def add_ocr_errors(words: Words, rate: float, rng: Random) -> Words | None:
    """Replaces letters by those that character recognition confuses with them, such as m by rn."""
    return change_words(words, rate, rng, misread)


def misread(word: str, rng: Random) -> str | None:
    """Returns the word with one confusion; None if it has no letters that are confused."""
    confusions = [(old, new) for old, new in CONFUSIONS if old in word]
    if not confusions:
        return None
    old, new = rng.choice(confusions)
    indices = [index for index in range(len(word)) if word.startswith(old, index)]
    index = rng.choice(indices)
    return word[:index] + new + word[index + len(old) :]


def change_case(words: Words, rate: float, rng: Random) -> Words | None:
    """Changes the case of drawn words or, one time in three, of the whole row."""
    change = rng.choice((str.lower, str.upper, str.capitalize))
    return change_words(words, 1.0 if rng.random() < 1 / 3 else rate, rng, lambda word, _: change(word))


def change_punctuation(words: Words, rate: float, rng: Random) -> Words | None:
    """Removes marks, repeats them, or puts commas between words."""
    kind = rng.randrange(3)
    marks = [index for index, word in enumerate(words) if is_mark(word) and not word.is_fixed and word.tag is None]
    if kind < 2 and marks:
        drawn = set(draw_some(marks, rate, rng))
        repeats = 0 if kind == 0 else 2
        changed = [new for index, word in enumerate(words) for new in [word] * (repeats if index in drawn else 1)]
        return changed if any(not is_mark(word) for word in changed) else None
    gaps = _find_gaps(words)
    drawn = set(draw_some(gaps, rate, rng))
    return insert_before(words, {index: [RowWord(",")] for index in drawn}) if drawn else None


def delete_words(words: Words, rate: float, rng: Random) -> Words | None:
    """Leaves units of words out, but never all, nor those that are fixed."""
    units = list(iterate_units(words))
    open_indices = [index for index, unit in enumerate(units) if not any(word.is_fixed for word in unit)]
    drawn = set(draw_some(open_indices, rate, rng))
    remaining = [word for index, unit in enumerate(units) if index not in drawn for word in unit]
    return remaining if drawn and any(not is_mark(word) for word in remaining) else None


def insert_phrases(words: Words, rate: float, rng: Random, rows: Sequence[Words]) -> Words | None:
    """Puts phrases of up to three words from other rows between words."""
    drawn = draw_some(_find_gaps(words), rate, rng)
    phrases = {}
    for index in drawn:
        other = [word for word in rng.choice(rows) if not is_mark(word)]
        if other:
            start = rng.randrange(len(other))
            phrase = other[start : start + rng.randint(1, _LONGEST_PHRASE)]
            phrases[index] = [RowWord(word.text, " ") for word in phrase]
    return insert_before(words, phrases) if phrases else None


def insert_before(words: Words, inserted: dict[int, Words]) -> Words:
    """Returns the words with others before those at some places."""
    return [new for index, word in enumerate(words) for new in (*inserted.get(index, ()), word)]


def _find_gaps(words: Words) -> list[int]:
    """Returns the places before which a word may be put: not at the start, nor within a unit or before a mark."""
    return [
        index
        for index in range(1, len(words))
        if words[index].unit != words[index - 1].unit and words[index].gap and not is_mark(words[index])
    ]
