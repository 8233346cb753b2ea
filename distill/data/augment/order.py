"""Another order: words, phrases and sentences exchanged, or a part of the text alone.

Each function returns the words in their new order, or None where there is only one.
"""

from random import Random

from distill.data.augment.noise import draw_some
from distill.data.augment.words import Words, is_mark, iterate_units, order_units

_SENTENCE_ENDS, _PHRASE_ENDS = frozenset(".!?"), frozenset(",;:.!?")
_CONJUNCTIONS = frozenset(("and", "or", "but", "because", "if", "when", "while", "so", "that", "which", "then"))


def swap_words(words: Words, rate: float, rng: Random) -> Words | None:
    """Exchanges units of words with those after them."""
    units = list(iterate_units(words))
    gaps = [unit[0].gap for unit in units]
    indices = [
        index for index in range(len(units) - 1) if not (is_mark(units[index][0]) or is_mark(units[index + 1][0]))
    ]
    last = -2
    for index in draw_some(indices, rate, rng):
        if index > last + 1:
            units[index], units[index + 1] = units[index + 1], units[index]
            last = index
    return order_units(units, gaps) if last >= 0 else None


def swap_phrases(words: Words, rate: float, rng: Random) -> Words | None:
    """Exchanges two phrases, which end at punctuation or before a conjunction; `rate` has no effect."""
    return _reorder(_split_phrases(words), rng, exchanged=2)


def shuffle_sentences(words: Words, rate: float, rng: Random) -> Words | None:
    """Puts the sentences of a row in a random order; `rate` has no effect."""
    return _reorder(_split_after(words, _SENTENCE_ENDS), rng)


def crop(words: Words, rate: float, rng: Random) -> Words | None:
    """Leaves out the share `rate` of the units, at least one, at the start, at the end or at both.

    Fixed words stay.
    """
    units = list(iterate_units(words))
    left = max(1, len(units) - max(1, round(rate * len(units))))
    fixed = [index for index, unit in enumerate(units) if any(word.is_fixed for word in unit)]
    first = max(0, fixed[-1] + 1 - left) if fixed else 0
    last = min(len(units) - left, fixed[0]) if fixed else len(units) - left
    if last < first or left == len(units):
        return None
    start = rng.randint(first, last)
    cropped = [word for unit in units[start : start + left] for word in unit]
    return cropped if any(not is_mark(word) for word in cropped) else None


def _split_after(words: Words, marks: frozenset[str]) -> list[Words]:
    """Returns the parts of a row, each with the mark that ends it."""
    parts: list[Words] = [[]]
    for index, word in enumerate(words):
        parts[-1].append(word)
        if word.text in marks and index + 1 < len(words) and words[index + 1].unit != word.unit:
            parts.append([])
    return parts


def _split_phrases(words: Words) -> list[Words]:
    parts: list[Words] = [[]]
    for part in _split_after(words, _PHRASE_ENDS):
        for index, word in enumerate(part):
            if parts[-1] and (index == 0 or (word.text.lower() in _CONJUNCTIONS and word.unit != part[index - 1].unit)):
                parts.append([])
            parts[-1].append(word)
    return parts


def _reorder(parts: list[Words], rng: Random, exchanged: int = 0) -> Words | None:
    """Returns the words with the parts, or `exchanged` of them, in another order; None if there is only one part."""
    if len(parts) < 2:
        return None
    gaps = [part[0].gap for part in parts]
    gaps = [gaps[0], *(gap or " " for gap in gaps[1:])]
    indices = sorted(rng.sample(range(len(parts)), exchanged or len(parts)))
    order = indices[:]
    while order == indices:
        rng.shuffle(order)
    new = list(parts)
    for index, source in zip(indices, order, strict=True):
        new[index] = parts[source]
    return order_units(new, gaps)
