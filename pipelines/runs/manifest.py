"""The manifest of a stage: its inputs and outputs, and checks that the stage's files are unchanged."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NotRequired, TypeAlias, TypedDict, cast

from distill.checkpoint.digest import hash_file as hash_file
from distill.checkpoint.digest import hash_json as hash_json
from distill.errors import InputError

MANIFEST = "manifest.json"
SCRATCH = "scratch"  # subfolder of a running stage, for checkpoints and the like; removed when it is complete
LOGS = "logs"  # retained, but not part of the result, because logs contain times
CHECKSUM = "checksum"
OPTIMIZER_BITS = "found/optimizer_bits"  # metric of a training whose AdamW states have fewer bits, to fit into memory

JsonObject: TypeAlias = dict[str, Any]  # an object that was read from JSON or YAML, or that is written as such


class OutputFile(TypedDict):
    """A file that a stage wrote."""

    sha256: str
    bytes: int


class StageIdentity(TypedDict):
    """All that decides a stage's result; its hash names the stage's folder."""

    stage: str
    version: int
    config: JsonObject
    inputs: dict[str, str]
    seed: NotRequired[int]


class Measurements(TypedDict):
    """What is known of a stage after it has run."""

    versions: dict[str, str]
    outputs: dict[str, OutputFile]
    digest: str
    metrics: JsonObject
    wall_seconds: float
    resumed: bool
    processes: int
    peak_memory_bytes: int


class Manifest(StageIdentity, Measurements):
    """The content of a complete stage's `manifest.json`."""

    checksum: str


class ManifestError(Exception):
    """A manifest that doesn't describe its folder reliably; the message completes a sentence about the stage."""


def seal_manifest(content: Mapping[str, object]) -> Manifest:
    """Returns the content converted to JSON types, with a checksum of all of it."""
    plain = json.loads(json.dumps(content, default=str))
    return cast(Manifest, plain | {CHECKSUM: hash_json(plain)})


def read_manifest(folder: Path) -> Manifest:
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
            "readable, or remove the folder to rebuild the stage"
        ) from error
    except (ValueError, RecursionError):
        problem = "is truncated or isn't JSON" if file.stat().st_size else "is empty"
        raise ManifestError(f"has a {MANIFEST} that {problem}") from None
    if not isinstance(content, dict):
        raise ManifestError(f"has an invalid {MANIFEST}: expected an object, found {type(content).__name__}")
    rest = {name: value for name, value in content.items() if name != CHECKSUM}
    if content.get(CHECKSUM) != hash_json(rest) or content.get("digest") != hash_outputs(content["outputs"]):
        raise ManifestError(f"has a {MANIFEST} that was changed after the stage ended: its checksum doesn't match")
    return cast(Manifest, content)


def read_complete_manifest(
    folder: Path, identity: StageIdentity, hash_one: Callable[[Path], str] = hash_file
) -> Manifest:
    """Returns the manifest of a complete stage whose files exist, are unchanged, and are the only ones.

    `hash_one` computes the hash of a file or looks it up.

    Raises:
        ManifestError: The manifest is missing or unreliable.
        InputError: The manifest is of another stage, or a file is missing, was changed or was added.
    """
    manifest = read_manifest(folder)
    expected = json.loads(json.dumps(identity, default=str))
    if any(manifest.get(key) != value for key, value in expected.items()):
        raise InputError(f"stage {str(folder)!r}: its manifest is of another stage; remove the folder to rebuild it")
    check_files(folder, manifest["outputs"], hash_one)
    return manifest


def check_files(folder: Path, outputs: Mapping[str, OutputFile], hash_one: Callable[[Path], str] = hash_file) -> None:
    """Checks that a stage's folder contains exactly the files that its manifest lists.

    Raises:
        InputError: A file is missing, was changed or was added, or is a link to a place outside the folder.
    """
    root = folder.resolve()
    for name, recorded in outputs.items():
        path = folder / name
        if not path.resolve().is_relative_to(root):
            raise InputError(
                f"stage {str(folder)!r}: {name} links to {str(path.resolve())!r}, outside the stage's folder: what is "
                "there may change at any time; move the file itself here, or remove the folder to rebuild the stage"
            )
        if not path.is_file() or hash_one(path) != recorded["sha256"]:
            problem = "was changed" if path.is_file() else "is missing"
            raise InputError(
                f"stage {str(folder)!r}: {name} {problem} since the stage ended: later stages would be built on "
                "unknown content; restore it, or remove the folder to rebuild the stage"
            )
    added = [name for name in list_files(folder) if name not in outputs]
    if added:
        others = f" and {len(added) - 1} others" if len(added) > 1 else ""
        raise InputError(
            f"stage {str(folder)!r}: {added[0]}{others} was added since the stage ended: later stages might read it "
            "too; move it elsewhere, or remove the folder to rebuild the stage"
        )


def set_aside(folder: Path) -> Path:
    """Renames a folder that can't be trusted, and returns its new path."""
    for number in count(1):
        aside = folder.with_name(f"{folder.name}.damaged-{number}")
        if not os.path.lexists(aside):
            folder.rename(aside)
            return aside
    raise AssertionError


def list_files(folder: Path) -> Sequence[str]:
    """Returns the names of the files and links in a stage's folder, except its scratch folder and manifest."""
    names = []
    for parent, folders, files in os.walk(folder):
        links = [name for name in folders if (Path(parent) / name).is_symlink()]
        names += [str((Path(parent) / name).relative_to(folder)) for name in (*files, *links)]
    manifest_names = (MANIFEST, f"{MANIFEST}.partial")
    return sorted(name for name in names if name not in manifest_names and not name.startswith(f"{SCRATCH}/"))


def describe_outputs(folder: Path, hash_one: Callable[[Path], str] = hash_file) -> dict[str, OutputFile]:
    """Returns the files that a stage wrote, as its manifest lists them."""
    paths = {name: folder / name for name in list_files(folder)}
    return {name: {"sha256": hash_one(path), "bytes": path.stat().st_size} for name, path in paths.items()}


def hash_outputs(outputs: Mapping[str, OutputFile]) -> str:
    """Returns the digest of the outputs that later stages depend on: names and contents, without logs."""
    return hash_json({name: file["sha256"] for name, file in outputs.items() if not name.startswith(f"{LOGS}/")})
