"""What the examples check of the folder that they are given, before they load it: they end with one line and code 2."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

Loaded = TypeVar("Loaded")
CLASSIFIER = "ForSequenceClassification"


def refuse(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def check_words(words: list[str], usage: str) -> None:
    if len(words) < 2:
        refuse(f"expected {usage}, found {len(words)} words")


def read_config(folder: Path, *files: str) -> dict[str, Any]:
    """The folder's config, where the folder has these files beside it."""
    if not folder.is_dir():
        found = "a file" if folder.exists() else "nothing there"
        refuse(f"{folder}: expected a folder that a run exported, found {found}")
    missing = [name for name in ("config.json", *files) if not (folder / name).is_file()]
    if missing:
        wanted = ", ".join(("config.json", *files))
        refuse(f"{folder}: expected the files {wanted}, found no {' and no '.join(missing)}: is it of another runtime?")
    config = loaded(folder / "config.json", lambda file: json.loads(Path(file).read_text()))
    if not isinstance(config, dict):
        refuse(f"{folder / 'config.json'}: expected an object, found {type(config).__name__}")
    return config


def labels_of(folder: Path, config: dict[str, Any]) -> list[str]:
    """Names of the classes of a model of one class a text, in the order of its logits."""
    others = [name for name in config.get("architectures") or [] if not name.endswith(CLASSIFIER)]
    problem = config.get("problem_type")
    if others or problem not in (None, "single_label_classification"):
        refuse(f"{folder}: expected a model of one class a text, found {', '.join(others) or problem}")
    names = config.get("id2label") or {}
    if sorted(names) != sorted(str(i) for i in range(len(names))) or not names:
        refuse(f"{folder}: expected the classes in id2label of config.json, found {names or 'none'}")
    return [names[str(i)] for i in range(len(names))]


def loaded(file: Path, load: Callable[[str], Loaded]) -> Loaded:
    """What `load` makes of a file."""
    try:
        return load(str(file))
    except Exception as error:  # tokenizers raises nothing narrower, and each runtime its own
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        refuse(f"{file}: can't be read: {reason}")
