"""Readers of checkpoints that no auto class loads whole, by a file that stands in their folder.

Others register theirs here by name: who only exports doesn't import them, and a fresh process is told which there are.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

READERS: dict[str, str] = {}  # file in the folder -> module:class, which reads it by `from_pretrained`


def reader_of(folder: Path) -> Any:
    """The class that reads the checkpoint in `folder`; None where an auto class does."""
    for file, name in READERS.items():
        if (folder / file).is_file():
            module, _, attributes = name.partition(":")
            found: Any = import_module(module)
            for attribute in attributes.split("."):
                found = getattr(found, attribute)
            return found
    return None
