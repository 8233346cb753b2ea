"""Synonyms from a lexicon file, also of inflected words."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from distill.data.augment.words import is_mark, split_words
from distill.data.text_files import read_text_file
from distill.errors import InputError

Lexicon = Mapping[str, list[str]]
_LEAST_KNOWN = 0.01  # share of the data's words that a lexicon of its language knows at least
_SUFFIXES = ("ing", "ed", "s")
_VOWELS = "aeiou"


def read_lexicon(file: Path) -> dict[str, list[str]]:
    """Reads a lexicon: a line for each word, with the word and its synonyms separated by tabs.

    Raises:
        InputError: The file is missing or not in UTF-8, a line has no tab, or there is no word.
    """
    content = read_text_file(file, "augment.lexicon", "there would be no synonyms")
    lexicon: dict[str, list[str]] = {}
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        word, *synonyms = (each.strip() for each in line.split("\t"))
        synonyms = [each for each in synonyms if each and each != word]
        if not synonyms:
            raise InputError(
                f"augment.lexicon {file}, line {number}: expected a word and its synonyms separated by tabs, found "
                f"{line[:60]!r}"
            )
        known = lexicon.setdefault(word.lower(), [])
        known += [each for each in synonyms if each not in known]
    if not lexicon:
        raise InputError(f"augment.lexicon {file}: expected a word in each line, found none")
    return lexicon


def check_lexicon_language(lexicon: Lexicon, texts: Iterable[str], file: str) -> None:
    """Checks that the lexicon knows words of the data.

    Raises:
        InputError: It knows fewer than one in a hundred of the different words.
    """
    words = {word.text.lower() for text in texts for word in split_words(text) if not is_mark(word)}
    known = sum(1 for word in words if find_synonyms(word, lexicon))
    if known < _LEAST_KNOWN * len(words):
        raise InputError(
            f"augment.lexicon {file}: expected words of the data's language, found {known:,} of its {len(words):,} "
            "different words: hardly any row would get a synonym"
        )


def find_synonyms(word: str, lexicon: Lexicon) -> list[str]:
    """Returns the synonyms of a word, in its inflection: of `buying` those of `buy`, with -ing.

    Only regular English endings are formed; irregular ones have lines of their own in the lexicon.
    """
    word = word.lower()
    if word in lexicon:
        return lexicon[word]
    for suffix in _SUFFIXES:
        for base in _find_bases(word, suffix):
            if base in lexicon:
                return [_inflect(each, suffix) for each in lexicon[base] if " " not in each]
    return []


def _find_bases(word: str, suffix: str) -> list[str]:
    """Returns the words that could have this ending."""
    if not word.endswith(suffix) or len(word) < len(suffix) + 2:
        return []
    stem = word[: -len(suffix)]
    bases = [stem, f"{stem}e"] if suffix != "s" else [stem]
    if stem[-1] == stem[-2] and stem[-1] not in _VOWELS and suffix != "s":
        bases.append(stem[:-1])
    if suffix == "s" and stem.endswith("ie"):
        bases.append(f"{stem[:-2]}y")
    elif suffix == "s" and stem.endswith("e"):
        bases.append(stem[:-1])
    elif suffix == "ed" and stem.endswith("i"):
        bases.append(f"{stem[:-1]}y")
    return bases


def _inflect(word: str, suffix: str) -> str:
    """Returns the regular English form of a word with an ending."""
    if suffix == "s":
        if word.endswith("y") and word[-2:-1] not in _VOWELS:
            return f"{word[:-1]}ies"
        return f"{word}es" if word.endswith(("s", "x", "z", "ch", "sh")) else f"{word}s"
    if suffix == "ed" and word.endswith("y") and word[-2:-1] not in _VOWELS:
        return f"{word[:-1]}ied"
    return f"{word[:-1]}{suffix}" if word.endswith("e") and not word.endswith("ee") else f"{word}{suffix}"
