"""Checks of an exported folder, before an example loads it: a problem ends the example with one line and code 2."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from tokenizers import Tokenizer

Loaded = TypeVar("Loaded")
CLASSIFIER = "ForSequenceClassification"


def exit_with_error(message: str) -> NoReturn:
    """Prints an error and exits with code 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def check_arguments(arguments: list[str], usage: str) -> None:
    """Checks that the command line names a folder and at least one text."""
    if len(arguments) < 2:
        exit_with_error(f"expected {usage}, found {len(arguments)} arguments")


def read_config(folder: Path, *files: str) -> dict[str, Any]:
    """Returns the folder's config.json, after checking that the folder contains it and these files."""
    if not folder.is_dir():
        found = "a file" if folder.exists() else "nothing there"
        exit_with_error(f"{folder}: expected a folder that a run exported, found {found}")
    required = ("config.json", *files)
    missing = [name for name in required if not (folder / name).is_file()]
    if missing:
        exit_with_error(
            f"{folder}: expected the files {', '.join(required)}, found no {' and no '.join(missing)}: is it the "
            "folder of another runtime?"
        )
    config = load_file(folder / "config.json", lambda file: json.loads(Path(file).read_text("utf-8")))
    if not isinstance(config, dict):
        exit_with_error(f"{folder / 'config.json'}: expected an object, found {type(config).__name__}")
    return config


def load_tokenizer(folder: Path, config: dict[str, Any]) -> Tokenizer:
    """Returns the folder's tokenizer, which truncates texts where the run that exported it did (`data.max_length`)."""
    tokenizer = load_file(folder / "tokenizer.json", Tokenizer.from_file)
    if tokenizer.truncation is None:
        tokenizer.enable_truncation(config.get("max_position_embeddings") or 512)
    return tokenizer


def read_labels(folder: Path, config: dict[str, Any]) -> list[str]:
    """Returns the names of the classes of a single-label text classifier, in the order of its logits."""
    others = [name for name in config.get("architectures") or [] if not name.endswith(CLASSIFIER)]
    problem = config.get("problem_type")
    if others or problem not in (None, "single_label_classification"):
        exit_with_error(f"{folder}: expected a single-label text classifier, found {', '.join(others) or problem}")
    names = config.get("id2label") or {}
    if sorted(names) != sorted(str(i) for i in range(len(names))) or not names:
        exit_with_error(f"{folder}: expected the classes in id2label of config.json, found {names or 'none'}")
    return [names[str(i)] for i in range(len(names))]


def read_cleaning(folder: Path) -> Callable[[str], str]:
    """Returns a function that cleans a text as the student's training texts were; most students need none."""
    if not (folder / "preprocessing.json").exists():
        return lambda text: text
    try:
        from distill.data.clean.deployment import read_preprocessing
    except ImportError:
        exit_with_error(
            f"{folder}: its texts are cleaned by preprocessing.json, which needs Stillroom: pip install -e '.[clean]'"
        )
    try:
        return read_preprocessing(folder)
    except ValueError as error:  # a step's package is missing, or the file is damaged
        exit_with_error(str(error))


def load_file(file: Path, load: Callable[[str], Loaded]) -> Loaded:
    """Returns what `load` reads from a file."""
    try:
        return load(str(file))
    except Exception as error:  # noqa: BLE001 - tokenizers raises plain exceptions, and each runtime its own
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        exit_with_error(f"{file}: can't be read: {reason}")
