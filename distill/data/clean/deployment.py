"""Cleaning that a deployed model applies to the texts it is asked about: a file beside the model, and its reader."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from distill.data.clean.config import CleaningStep, parse_steps
from distill.data.clean.spelling import Speller
from distill.data.clean.text_steps import build_text_steps
from distill.errors import InputError

PREPROCESSING = "preprocessing.json"
_KEY = "clean_texts_by"


def write_preprocessing(folder: Path, steps: Sequence[CleaningStep], speller: Speller | None) -> None:
    """Writes the steps, and what spelling needs, to the file PREPROCESSING."""
    content: dict[str, object] = {
        _KEY: ",".join(f"{step.name}={step.value}" if step.value else step.name for step in steps)
    }
    if speller is not None and any(step.name == "spelling" for step in steps):
        content["spelling"] = {
            "candidates": dict(speller.candidates),
            "counts": dict(speller.counts),
            "pairs": [[*pair, count] for pair, count in speller.pairs.items()],
        }
    (folder / PREPROCESSING).write_text(json.dumps(content, ensure_ascii=False) + "\n", "utf-8")


def read_deployed_steps(folder: Path) -> tuple[CleaningStep, ...]:
    """Returns the steps in the folder's file, in order."""
    file = folder / PREPROCESSING
    return parse_steps(json.loads(file.read_text("utf-8"))[_KEY], str(file))


def read_preprocessing(folder: Path) -> Callable[[str], str]:
    """Returns a function that cleans a text as in training; it changes nothing if the folder has no such file.

    Raises:
        InputError: The file is damaged.
    """
    file = folder / PREPROCESSING
    if not file.exists():
        return lambda text: text
    try:
        content = json.loads(file.read_text("utf-8"))
        steps = parse_steps(content[_KEY], str(file))
        stored = content.get("spelling")
        speller = None
        if stored:
            pairs = {(one, two): count for one, two, count in stored["pairs"]}
            speller = Speller(stored["candidates"], stored["counts"], pairs)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file}: expected the steps of cleaning, found a damaged file: {error}") from error
    built = build_text_steps(steps, {} if speller is None else {"spelling": speller.correct})

    def clean(text: str) -> str:
        for step in built:
            text = step.change(text)
        return text

    return clean
