"""Rows made from templates whose slots are filled from lists, given in a file or found in the data."""

import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import yaml

from distill.data.augment.words import Words, split_words
from distill.data.text_files import read_text_file
from distill.errors import InputError

_SLOT = re.compile(r"\{(\w+)\}")
_SHARED = 2  # fillers that two patterns of the data share if the others of each fit into the other


@dataclass(frozen=True)
class TemplateFile:
    """Templates and the fillers of their slots.

    Args:
        slots: The fillers of each slot.
        templates: The templates of each label; those under "" belong to no label.
    """

    slots: dict[str, list[str]] = field(default_factory=dict)
    templates: dict[str, list[str]] = field(default_factory=dict)


def read_slot_templates(file: Path) -> TemplateFile:
    """Reads a YAML file with `slots` (name: list of fillers) and `templates` (label: list of texts, or a list).

    Raises:
        InputError: The file is missing or has another form; a template has a slot without fillers.
    """
    where = f"augment.templates {file}"
    text = read_text_file(file, "augment.templates", "there would be no templates")
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"{where}: expected YAML, found {str(error).splitlines()[0]}") from error
    if not isinstance(content, dict) or not content.keys() <= {"slots", "templates"} or not content:
        found = ", ".join(map(str, content)) if isinstance(content, dict) else type(content).__name__
        raise InputError(f"{where}: expected slots and templates, found {found}")
    fillers = content.get("slots") or {}
    if not isinstance(fillers, dict):
        raise InputError(f"{where}: slots: expected a list of fillers for each name, found {type(fillers).__name__}")
    slots = {str(name): _read_texts(texts, f"{where}: slot {name}") for name, texts in fillers.items()}
    by_label = content.get("templates") or {}
    by_label = by_label if isinstance(by_label, dict) else {"": by_label}
    templates = {str(label): _read_texts(texts, f"{where}: templates of {label}") for label, texts in by_label.items()}
    for template in (template for texts in templates.values() for template in texts):
        for slot in _SLOT.findall(template):
            if slot not in slots:
                raise InputError(
                    f"{where}: template {template!r}: expected fillers of the slot {slot!r}, found "
                    f"{', '.join(slots) or 'no slots'}: it couldn't be filled"
                )
    return TemplateFile(slots, templates)


def _read_texts(texts: Any, where: str) -> list[str]:
    if not isinstance(texts, list) or not texts or not all(isinstance(each, str | int | float) for each in texts):
        raise InputError(f"{where}: expected a list of texts, found {texts!r:.60}: nothing could be filled in")
    return [str(each) for each in texts]


def check_template_labels(file: TemplateFile, labels: Sequence[str], where: str) -> None:
    """Checks that templates are of labels of the data.

    Raises:
        InputError: A label isn't among them.
    """
    unknown = [label for label in file.templates if label and label not in labels]
    if unknown:
        raise InputError(
            f"augment.templates {where}: expected labels of the data, such as {labels[0]!r}, found {unknown[0]!r}: its "
            "templates would never be used"
        )


def fill_template(template: str, slots: dict[str, list[str]], rng: Random) -> Words:
    """Returns the words of a template with a filler drawn for each slot."""
    return split_words(_SLOT.sub(lambda match: rng.choice(slots[match[1]]), template))


class Pattern(NamedTuple):
    """A row of the data with a gap in place of one word, for which the data has several words."""

    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True)
class FoundTemplates:
    """Patterns of each class, with words that fill their gap although the data doesn't have that row.

    Args:
        of_class: class -> its patterns, as the words of a row with the place of the gap, and the fillers of each.
    """

    of_class: dict[Hashable, list[tuple[Words, int, list[str]]]]

    @classmethod
    def find(cls, rows: Iterable[tuple[Words, Hashable]]) -> "FoundTemplates":
        """Returns the patterns of rows, given with their classes.

        A pattern has a gap that rows of a class fill with different words. Two patterns take each other's fillers if
        at least two fillers are the same.
        """
        fillers: dict[tuple[Hashable, Pattern], dict[str, None]] = {}
        examples: dict[tuple[Hashable, Pattern], tuple[Words, int]] = {}
        for words, label in rows:
            lower = tuple(word.text.lower() for word in words)
            for index, word in enumerate(words):
                if word.text.isalpha() and len(words) > 1:
                    key = label, Pattern(lower[:index], lower[index + 1 :])
                    fillers.setdefault(key, {})[lower[index]] = None
                    examples.setdefault(key, (words, index))
        fillers = {key: gap_fillers for key, gap_fillers in fillers.items() if len(gap_fillers) >= _SHARED}
        sharing: dict[str, list[dict[str, None]]] = {}
        for gap_fillers in fillers.values():
            for filler in gap_fillers:
                sharing.setdefault(filler, []).append(gap_fillers)
        of_class: dict[Hashable, list[tuple[Words, int, list[str]]]] = {}
        for (label, pattern), gap_fillers in fillers.items():
            near = (other for filler in gap_fillers for other in sharing[filler])
            new = {
                word for other in near if len(other.keys() & gap_fillers.keys()) >= _SHARED for word in other
            } - gap_fillers.keys()
            if new:
                words, index = examples[label, pattern]
                of_class.setdefault(label, []).append((words, index, sorted(new)))
        return cls(of_class)

    def fill(self, label: Hashable, rng: Random) -> Words | None:
        """Returns a row of the class that the data doesn't have; None without a pattern."""
        patterns = self.of_class.get(label)
        if not patterns:
            return None
        words, index, fillers = rng.choice(patterns)
        return [*words[:index], words[index]._replace(text=rng.choice(fillers)), *words[index + 1 :]]
