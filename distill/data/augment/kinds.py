"""The ways in which a synthetic row is made, ready to be applied to the rows of a data set."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import NamedTuple, TypeAlias

from distill.data.augment import noise, order, rules
from distill.data.augment.lexicon import Lexicon
from distill.data.augment.masked import Proposals, replace_by_proposals
from distill.data.augment.ngrams import count_ngrams
from distill.data.augment.templates import FoundTemplates, TemplateFile, fill_template
from distill.data.augment.words import Words, split_words

WordChange: TypeAlias = Callable[[Words, float, Random], Words | None]
_CHANGES: dict[str, WordChange] = {
    "contractions": rules.change_contractions,
    "swap": order.swap_words,
    "phrases": order.swap_phrases,
    "sentences": order.shuffle_sentences,
    "crop": order.crop,
    "delete": noise.delete_words,
    "keyboard": noise.add_keyboard_typos,
    "ocr": noise.add_ocr_errors,
    "case": noise.change_case,
    "punctuation": noise.change_punctuation,
}


class SourceText(NamedTuple):
    """A text that a synthetic one is made from.

    Args:
        words: Its words.
        row: The number of its row.
        column: 0 for the text, 1 for the second text of a pair.
        label: The class of the row; None without classes.
    """

    words: Words
    row: int
    column: int
    label: Hashable


Kind: TypeAlias = Callable[[SourceText, Random], Words | None]


@dataclass(frozen=True)
class Resources:
    """What kinds need beside the rows.

    Args:
        names: The names of the labels, by which the templates of a file are found.
        types: For tagged rows, the type of each tag within a name.
        lexicon: Synonyms.
        templates: The content of the templates' file; None without one.
        proposals: What a masked language model proposes for each word of each row, for each column.
    """

    names: Sequence[str] = ()
    types: Mapping[int, str] | None = None
    lexicon: Lexicon | None = None
    templates: TemplateFile | None = None
    proposals: Sequence[Sequence[Proposals]] = ()


def build_kinds(rates: Mapping[str, float], sources: Sequence[SourceText], resources: Resources) -> dict[str, Kind]:
    """Returns the kinds by name.

    Args:
        rates: kind -> share of words that it changes.
        sources: All texts of the rows.
        resources: What they need beside them.
    """
    return {kind: _build_kind(kind, rate, sources, resources) for kind, rate in rates.items()}


def _build_kind(kind: str, rate: float, sources: Sequence[SourceText], resources: Resources) -> Kind:
    rows = [source.words for source in sources]
    if kind == "masked":
        return lambda source, rng: replace_by_proposals(
            source.words, rate, rng, resources.proposals[source.column][source.row]
        )
    if kind == "ngrams":
        models = count_ngrams((source.words, source.label) for source in sources)
        return lambda source, rng: models[source.label].draw(rng)
    if kind == "templates":
        return _build_templates(sources, resources)
    change: WordChange
    if kind == "insert":
        change = partial(noise.insert_phrases, rows=rows)
    elif kind == "numbers":
        change = partial(rules.swap_numbers, numbers=rules.find_numbers(rows))
    elif kind == "names":
        types = resources.types or {}
        change = partial(rules.swap_names, names=rules.find_names(rows, types), types=types)
    elif kind == "fillers":
        slots = resources.templates.slots if resources.templates else {}
        fillers = {
            name: [tuple(word.text for word in split_words(each)) for each in texts] for name, texts in slots.items()
        }
        change = partial(rules.swap_fillers, slots=fillers)
    elif kind == "synonyms":
        change = partial(rules.replace_synonyms, lexicon=resources.lexicon or {})
    else:
        change = _CHANGES[kind]
    return lambda source, rng: change(source.words, rate, rng)


def _build_templates(sources: Sequence[SourceText], resources: Resources) -> Kind:
    file = resources.templates
    if file is None:
        patterns = FoundTemplates.find((source.words, source.label) for source in sources)
        return lambda source, rng: patterns.fill(source.label, rng)

    def fill(source: SourceText, rng: Random) -> Words | None:
        name = resources.names[source.label] if isinstance(source.label, int) and resources.names else ""
        texts = file.templates.get(name) or file.templates.get("", [])
        return fill_template(rng.choice(texts), file.slots, rng) if texts else None

    return fill
