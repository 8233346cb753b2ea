"""The manifest of a stage: its inputs and outputs, and checks that the stage's files are unchanged."""

import hashlib
import json
import os
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from distill.errors import InputError

MANIFEST = "manifest.json"
SCRATCH = "scratch"  # subfolder of a running stage, for checkpoints and the like; removed when it is complete
LOGS = "logs"  # retained, but not part of the result, because logs contain times
CHECKSUM = "checksum"


class ManifestError(Exception):
    """A manifest that doesn't describe its folder reliably; the message completes a sentence about the stage."""


def seal(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content converted to JSON types, with a checksum of all of it."""
    plain = json.loads(json.dumps(content, default=str))
    return plain | {CHECKSUM: digest_of(plain)}


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns the manifest of a stage's folder.

    Raises:
        ManifestError: There is no manifest, or it isn't as the stage wrote it.
        InputError: The manifest can't be read.
    """
    file = folder / MANIFEST
    if file.is_symlink() or not file.is_file():
        raise ManifestError(f"has no {MANIFEST}")
    try:
        content = json.loads(file.read_bytes())
    except OSError as error:
        raise InputError(
            f"stage {str(folder)!r}: its {MANIFEST} can't be read ({error.strerror}); nothing was changed: make it "
            "readable, or remove the folder to make the stage again"
        ) from error
    except (ValueError, RecursionError):
        what = "is cut off, or no JSON" if file.stat().st_size else "is empty"
        raise ManifestError(f"has a {MANIFEST} that {what}") from None
    if not isinstance(content, dict):
        raise ManifestError(f"has a {MANIFEST} of another shape: expected an object, found {type(content).__name__}")
    rest = {name: value for name, value in content.items() if name != CHECKSUM}
    if content.get(CHECKSUM) != digest_of(rest) or content.get("digest") != digest_of_outputs(content["outputs"]):
        raise ManifestError(
            f"has a {MANIFEST} that was changed since the stage ended: its checksum is of another content"
        )
    return content


def complete_manifest(folder: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the manifest of a complete stage whose files exist, are unchanged, and are the only ones.

    Raises:
        ManifestError: The manifest is missing or unreliable.
        InputError: The manifest is of another stage, or a file is missing, was changed or was added.
    """
    manifest = read_manifest(folder)
    if any(manifest.get(key) != value for key, value in json.loads(json.dumps(wanted, default=str)).items()):
        raise InputError(f"stage {str(folder)!r}: its manifest is of another stage; remove the folder to make it again")
    check_files(folder, manifest["outputs"])
    return manifest


def check_files(folder: Path, outputs: Mapping[str, Mapping[str, Any]]) -> None:
    """Checks that a stage's folder contains exactly the files that its manifest lists.

    Raises:
        InputError: A file is missing, was changed or was added, or leads out of the folder.
    """
    root = folder.resolve()
    for name, stated in outputs.items():
        path = folder / name
        if not path.resolve().is_relative_to(root):
            raise InputError(
                f"stage {str(folder)!r}: {name} leads out of the stage's folder, to {str(path.resolve())!r}: what lies "
                "there may change at any time; put the file itself there, or remove the folder to make the stage again"
            )
        if not path.is_file() or sha256(path) != stated["sha256"]:
            what = "was changed" if path.is_file() else "is missing"
            raise InputError(
                f"stage {str(folder)!r}: {name} {what} since the stage ended: what follows would be built on something "
                "unknown; restore it, or remove the folder to make the stage again"
            )
    added = [name for name in written_files(folder) if name not in outputs]
    if added:
        others = f" and {len(added) - 1} others" if len(added) > 1 else ""
        raise InputError(
            f"stage {str(folder)!r}: {added[0]}{others} was added since the stage ended: what follows might read it "
            "too; move it elsewhere, or remove the folder to make the stage again"
        )


def set_aside(folder: Path) -> Path:
    """Renames a folder that can't be trusted, and returns its new path."""
    for number in count(1):
        aside = folder.with_name(f"{folder.name}.damaged-{number}")
        if not os.path.lexists(aside):
            folder.rename(aside)
            return aside
    raise AssertionError


def written_files(folder: Path) -> list[str]:
    """Returns the names of the files and links in a stage's folder, except its scratch folder and manifest."""
    found = []
    for place, folders, files in os.walk(folder):
        links = [name for name in folders if (Path(place) / name).is_symlink()]
        found += [str((Path(place) / name).relative_to(folder)) for name in (*files, *links)]
    own = (MANIFEST, f"{MANIFEST}.partial")
    return sorted(name for name in found if name not in own and not name.startswith(f"{SCRATCH}/"))


def outputs_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns the files that a stage wrote, as its manifest lists them."""
    paths = {name: folder / name for name in written_files(folder)}
    return {name: {"sha256": sha256(path), "bytes": path.stat().st_size} for name, path in paths.items()}


def digest_of_outputs(outputs: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the digest of the outputs that later stages depend on: names and contents, without logs."""
    return digest_of({name: each["sha256"] for name, each in outputs.items() if not name.startswith(f"{LOGS}/")})


def digest_of(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
