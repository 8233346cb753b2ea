"""Rules that keep the meaning: contractions, other numbers, names and slot fillers, synonyms.

Each function returns changed words, or None where it finds nothing to change.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from random import Random

from distill.data.augment.lexicon import Lexicon, find_synonyms
from distill.data.augment.noise import draw_some
from distill.data.augment.words import INSERTED, RowWord, Words, is_mark, iterate_units, match_case

_NEGATED = ("is", "are", "was", "were", "do", "does", "did", "has", "have", "had", "would", "could", "should", "must",
            "might", "need")  # fmt: skip
_SUBJECTS = {
    "am": ["i"],
    "are": ["you", "we", "they"],
    "is": ["it", "he", "she", "that", "there", "what", "where", "who", "how"],
    "will": ["i", "you", "we", "they", "it", "he", "she", "that", "there"],
    "have": ["i", "you", "we", "they"],
    "would": ["i", "you", "we", "they", "he", "she"],
}
_ENDINGS = {"am": "'m", "are": "'re", "is": "'s", "will": "'ll", "have": "'ve", "would": "'d"}
CONTRACTIONS = (
    {(verb, "not"): f"{verb}n't" for verb in _NEGATED}
    | {("can", "not"): "can't", ("will", "not"): "won't", ("let", "us"): "let's"}
    | {(subject, verb): subject + _ENDINGS[verb] for verb, subjects in _SUBJECTS.items() for subject in subjects}
)
EXPANSIONS = {short: long for long, short in CONTRACTIONS.items()} | {"cannot": ("can", "not")}
_MAIN_VERBS = ("have",)  # which aren't contracted where they are the main verb: do you have
_PARTICIPLES = frozenset(("been", "become", "better", "come", "done", "gone", "got", "had", "made", "seen", "taken"))
_I = re.compile(r"^i\b")
_DIGIT = re.compile(r"\d")


def change_contractions(words: Words, rate: float, rng: Random) -> Words | None:
    """Contracts words, such as do not to don't, and expands contractions."""
    forms = {index: form for index in range(len(words)) if (form := _find_other_form(words, index)) is not None}
    changed = list(words)
    for index in sorted(draw_some(list(forms), rate, rng), reverse=True):
        replaced, new = forms[index]
        first = words[index]
        shouted = first.text.isupper() and len(first.text) > 1
        texts = [text.upper() for text in new] if shouted else [match_case(new[0], first.text), *new[1:]]
        changed[index : index + replaced] = [
            first._replace(text=_I.sub("I", text), gap=first.gap if number == 0 else " ")
            for number, text in enumerate(texts)
        ]
    return changed if forms else None


def _find_other_form(words: Words, index: int) -> tuple[int, Sequence[str]] | None:
    """Returns the number of words that have another form, and this form; None if they have none."""
    first = words[index]
    if first.is_fixed:
        return None
    text = first.text.lower().replace("’", "'")
    following, after = ([*words[index + 1 : index + 3], None, None])[:2]
    if text in EXPANSIONS:  # it's been and I'd been stand for has and had
        is_other = text.endswith(("'s", "'d")) and following is not None and _is_participle(following.text.lower())
        return None if is_other else (1, EXPANSIONS[text])
    if following is None or following.is_fixed or following.tag != first.tag:
        return None
    verb = following.text.lower()
    short = CONTRACTIONS.get((text, verb))
    if short is None or (verb != "not" and (after is None or is_mark(after) or verb in _MAIN_VERBS)):
        return None  # the last word of a clause keeps its stress: tell me what it is
    return 2, (short,)


def _is_participle(word: str) -> bool:
    return word in _PARTICIPLES or word.endswith("ed")


def find_numbers(rows: Iterable[Words]) -> dict[str, list[str]]:
    """Returns the numbers of the rows by their shape, in which every digit is a 0."""
    by_shape: dict[str, dict[str, None]] = {}
    for words in rows:
        for word in words:
            if word.text[:1].isdigit():
                by_shape.setdefault(_DIGIT.sub("0", word.text), {})[word.text] = None
    return {shape: list(numbers) for shape, numbers in by_shape.items()}


def swap_numbers(words: Words, rate: float, rng: Random, numbers: Mapping[str, Sequence[str]]) -> Words | None:
    """Replaces numbers by others of the same shape in the data; without another, by random digits."""
    indices = [index for index, word in enumerate(words) if word.text[:1].isdigit() and not word.is_fixed]
    changed = list(words)
    for index in draw_some(indices, rate, rng):
        old = words[index].text
        others = [each for each in numbers.get(_DIGIT.sub("0", old), ()) if each != old]
        new = rng.choice(others) if others else _draw_digits(old, rng)
        changed[index] = words[index]._replace(text=new)
    return changed if changed != words else None


def _draw_digits(number: str, rng: Random) -> str:
    digits = iter(range(len(number)))
    return _DIGIT.sub(lambda _: str(rng.randint(1 if next(digits) == 0 else 0, 9)), number)


def find_names(rows: Iterable[Words], types: Mapping[int, str]) -> dict[str, list[Words]]:
    """Returns the names in tagged rows by type.

    Args:
        rows: The tagged rows.
        types: The type of each tag within a name: `PER` of B-PER and I-PER.
    """
    by_type: dict[str, dict[tuple[str, ...], Words]] = {}
    for words in rows:
        for unit in iterate_units(words):
            if unit[0].tag in types:
                by_type.setdefault(types[unit[0].tag], {}).setdefault(tuple(word.text for word in unit), unit)
    return {kind: list(names.values()) for kind, names in by_type.items()}


def swap_names(
    words: Words, rate: float, rng: Random, names: Mapping[str, Sequence[Words]], types: Mapping[int, str]
) -> Words | None:
    """Replaces names by others of the same type, with their tags.

    Source: Dai and Adel, "An Analysis of Simple Data Augmentation for Named Entity Recognition" (COLING 2020),
    section 3.3, mention replacement.
    """
    units = list(iterate_units(words))
    indices = [index for index, unit in enumerate(units) if unit[0].tag in types]
    for index in draw_some(indices, rate, rng):
        old = units[index]
        new = rng.choice(names[types[old[0].tag]])
        units[index] = [
            word._replace(gap=old[0].gap if number == 0 else word.gap or " ", origin=INSERTED, unit=old[0].unit)
            for number, word in enumerate(new)
        ]
    changed = [word for unit in units for word in unit]
    return changed if [word.text for word in changed] != [word.text for word in words] else None


def swap_fillers(
    words: Words, rate: float, rng: Random, slots: Mapping[str, Sequence[tuple[str, ...]]]
) -> Words | None:
    """Replaces fillers of slots, such as the names of currencies, by others of the same slot.

    Args:
        words: The words of a row.
        rate: Probability of each filler to be replaced.
        rng: Source of chance.
        slots: The fillers of each slot, as words in lower case.
    """
    slot_of = {filler: fillers for fillers in slots.values() for filler in fillers}
    longest = max(map(len, slot_of), default=0)
    lower = [word.text.lower() for word in words]
    matches: list[tuple[int, tuple[str, ...]]] = []
    index = 0
    while index < len(words):
        sizes = range(min(longest, len(words) - index), 0, -1)
        filler = next((each for size in sizes if (each := tuple(lower[index : index + size])) in slot_of), ())
        if filler and not any(word.is_fixed or word.tag is not None for word in words[index : index + len(filler)]):
            matches.append((index, filler))
        index += max(1, len(filler))
    changed = list(words)
    for index, filler in sorted(draw_some(matches, rate, rng), reverse=True):
        others = [each for each in slot_of[filler] if each != filler]
        if others:
            new, first = rng.choice(others), words[index]
            changed[index : index + len(filler)] = [
                RowWord(match_case(text, first.text) if number == 0 else text, first.gap if number == 0 else " ")
                for number, text in enumerate(new)
            ]
    return changed if changed != words else None


def replace_synonyms(words: Words, rate: float, rng: Random, lexicon: Lexicon) -> Words | None:
    """Replaces words by their synonyms; see `distill.data.augment.lexicon`."""
    indices = [
        index
        for index, word in enumerate(words)
        if not word.is_fixed and not is_mark(word) and find_synonyms(word.text, lexicon)
    ]
    changed = list(words)
    for index in draw_some(indices, rate, rng):
        old = words[index].text
        changed[index] = words[index]._replace(text=match_case(rng.choice(find_synonyms(old, lexicon)), old))
    return changed if changed != words else None
