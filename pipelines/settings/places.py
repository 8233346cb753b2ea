"""Checkpoints and data on this machine are there and can be read; a hub id is left to whoever asks the hub."""

from collections.abc import Iterable
from pathlib import Path

from distill.checkpoint.folder import PACKAGE as PACKAGE
from distill.checkpoint.folder import checkpoint_folder
from distill.errors import InputError


def check_models(models: Iterable[tuple[str, str]]) -> None:
    """Checks (role, name) of checkpoints: those on this machine describe a model and have its files.

    Raises:
        InputError: A path where nothing is, or no checkpoint.
    """
    for role, name in models:
        there = is_there(name, role)
        if there or name.startswith(PACKAGE):
            checkpoint_folder(name, role)
        elif is_path(name):
            raise InputError(
                f"{role} {name!r}: no such folder here; expected one with config.json, safetensors and a tokenizer, or "
                "a hub id"
            )


def is_path(name: str) -> bool:
    """Whether a name can't be one of the hub's, which are of one or two parts."""
    if name.startswith(PACKAGE):
        return False
    return name.startswith(("/", ".")) or name.endswith("/") or name.count("/") > 1


def is_there(path: str, role: str) -> bool:
    """
    Raises:
        InputError: A name that no file can have, or a folder on the way that may not be read.
    """
    try:
        return Path(path).exists()
    except OSError as error:
        raise InputError(f"{role} {path!r}: can't be looked at: {error.strerror}") from error


def check_data(path: str, subset: str | None = None) -> None:
    """
    Raises:
        InputError: A path where nothing is.
    """
    place = Path(path)
    if is_there(path, "data"):
        return
    from distill.data.sources.tables import READERS, read_splits

    if place.is_absolute() or path.startswith(".") or place.suffix in READERS:
        read_splits(path, subset)
