"""Registry of reader classes for checkpoints that no auto class loads completely, by a file in the checkpoint's folder.

Other modules register their readers as strings, so that a command that only exports need not import them and the
registry can be passed to a new process.
"""

from importlib import import_module
from operator import attrgetter
from pathlib import Path

from distill.checkpoint.auto_class import AutoClass

CHECKPOINT_READERS: dict[str, str] = {}  # file in the folder -> module:class with `from_pretrained`


def find_reader(folder: Path) -> AutoClass | None:
    """Returns the class that reads the checkpoint in `folder`; None if an auto class reads it."""
    for file, name in CHECKPOINT_READERS.items():
        if (folder / file).is_file():
            module, _, attributes = name.partition(":")
            reader: AutoClass = attrgetter(attributes)(import_module(module))
            return reader
    return None
