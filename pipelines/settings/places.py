"""Checks that local checkpoints and data exist and can be read; hub ids are checked when they are downloaded."""

from pathlib import Path

from distill.checkpoint.checkpoint import Checkpoint, open_checkpoint
from distill.checkpoint.folder import PACKAGE
from distill.errors import InputError

URL_MARK = "://"


def is_url(name: str) -> bool:
    """Returns whether a name is a URL of an object store."""
    return URL_MARK in name


def check_local(setting: str, value: str) -> None:
    """Checks that the folder to write to isn't a URL.

    Raises:
        InputError: It is.
    """
    if is_url(value):
        raise InputError(
            f"--{setting} {value!r}: expected a folder on this machine, found a URL: only distill, prune and quantize "
            "write to an object store"
        )


def open_local(name: str, role: str) -> Checkpoint | None:
    """Opens a checkpoint on this machine; returns None for a hub id, which is downloaded later.

    Raises:
        InputError: The path doesn't exist, or isn't a checkpoint.
    """
    if path_exists(name, role) or name.startswith(PACKAGE):
        return open_checkpoint(name, role)
    if is_path(name):
        raise InputError(
            f"{role} {name!r}: no such folder here; expected one with config.json, safetensors and a tokenizer, or "
            "a hub id"
        )
    return None


def is_path(name: str) -> bool:
    """Returns whether a name can't be a hub id; hub ids have one or two parts."""
    if name.startswith(PACKAGE):
        return False
    return name.startswith(("/", ".")) or name.endswith("/") or name.count("/") > 1


def path_exists(path: str, role: str) -> bool:
    """Returns whether a path exists.

    Raises:
        InputError: The name is invalid as a file name, or a parent folder can't be accessed.
    """
    try:
        return Path(path).exists()
    except OSError as error:
        raise InputError(f"{role} {path!r}: can't be accessed: {error.strerror}") from error


def check_data(path: str, subset: str | None = None) -> None:
    """Checks that data given as a local path exist.

    Raises:
        InputError: The path doesn't exist.
    """
    local_path = Path(path)
    if path_exists(path, "data"):
        return
    from distill.data.sources.tables import TABLE_READERS, read_splits

    if local_path.is_absolute() or path.startswith(".") or local_path.suffix in TABLE_READERS:
        read_splits(path, subset)
