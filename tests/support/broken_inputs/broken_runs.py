"""Finished runs with damaged folders: manifests and the files that they list.

The command either rejects each with a message that names the stage, or rebuilds the stage with the same student.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from support.broken_inputs.case import Case, Flags, Workspace

STAGES = ("data", "teacher", "cache", "distill")
REJECTED_OR_REBUILT = -1  # exit code 0 or 2: the student must be the same, or nothing may be built on the damage


def folder_of(workspace: Workspace, stage: str) -> Path:
    finished = [file.parent for file in (workspace.run / stage).glob("*/manifest.json")]
    (folder,) = (each for each in finished if "damaged" not in each.name)  # skips folders that were set aside
    return folder


def with_manifest(stage: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Workspace], Flags]:
    def damage(workspace: Workspace) -> Flags:
        file = folder_of(workspace, stage) / "manifest.json"
        file.write_text(json.dumps(change(json.loads(file.read_text()))))
        return {}

    return damage


def with_bytes(stage: str, change: Callable[[bytes], bytes | None]) -> Callable[[Workspace], Flags]:
    def damage(workspace: Workspace) -> Flags:
        file = folder_of(workspace, stage) / "manifest.json"
        content = change(file.read_bytes())
        file.unlink()
        if content is not None:
            file.write_bytes(content)
        return {}

    return damage


def in_folder(stage: str, change: Callable[[Path], None]) -> Callable[[Workspace], Flags]:
    def damage(workspace: Workspace) -> Flags:
        change(folder_of(workspace, stage))
        return {}

    return damage


def largest(folder: Path) -> Path:
    return max(
        (file for file in folder.rglob("*") if file.is_file() and file.name != "manifest.json"),
        key=lambda file: file.stat().st_size,
    )


def flipped(folder: Path) -> None:
    file = largest(folder)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def replaced_by_folder(folder: Path) -> None:
    file = largest(folder)
    file.unlink()
    file.mkdir()


def replaced_by_link(folder: Path) -> None:
    file = largest(folder)
    file.unlink()
    file.symlink_to("/etc/hostname")


def listed(manifest: dict[str, Any], name: str) -> dict[str, Any]:
    return manifest | {"outputs": manifest["outputs"] | {name: {"sha256": "0" * 64, "bytes": 0}}}


def manifest_cases() -> Iterator[Case]:
    for stage in STAGES:
        for what, change in (
            ("empty", lambda b: b""),
            ("cut off", lambda b: b[: len(b) // 2]),
            ("gone", lambda b: None),
            ("bytes", lambda b: b"\xff\xfe\x00"),
            ("deep", lambda b: b"[" * 20000),
        ):
            yield Case(f"{stage}: manifest {what}", with_bytes(stage, change), stage, REJECTED_OR_REBUILT)
        for what, shape in (
            ("a list", lambda m: [m]),
            ("a number", lambda m: 3),
            ("without outputs", lambda m: dropped(m, "outputs")),
            ("with outputs as a list", lambda m: m | {"outputs": list(m["outputs"])}),
            ("with outputs of words", lambda m: m | {"outputs": dict.fromkeys(m["outputs"], "x")}),
            ("without a digest", lambda m: dropped(m, "digest")),
            ("with another digest", lambda m: m | {"digest": "0" * 64}),
            ("with a digest of a number", lambda m: m | {"digest": 5}),
            ("of another stage", lambda m: m | {"stage": "x"}),
            ("of another seed", lambda m: m | {"seed": 77}),
            ("that lists what isn't there", lambda m: listed(m, "gone.bin")),
            ("that lists a place outside", lambda m: listed(m, "../../../teacher/config.json")),
            ("that lists an absolute place", lambda m: listed(m, "/etc/hostname")),
            ("that lists nothing", lambda m: m | {"outputs": {}}),
            ("without metrics", lambda m: dropped(m, "metrics")),
            ("with metrics of a word", lambda m: m | {"metrics": "good"}),
        ):
            yield Case(f"{stage}: manifest {what}", with_manifest(stage, shape), stage, REJECTED_OR_REBUILT)
        for what, spoil in (
            ("a byte flipped", flipped),
            ("a file gone", lambda f: largest(f).unlink()),
            ("a file in its place a folder", replaced_by_folder),
            ("a file in its place a link", replaced_by_link),
            ("a file added", lambda f: (f / "extra.txt").write_text("mine") and None),
            ("all files gone", emptied),
        ):
            yield Case(f"{stage}: {what}", in_folder(stage, spoil), stage, REJECTED_OR_REBUILT)
        yield Case(f"{stage}: its folder is a file", folder_as_file(stage), stage, REJECTED_OR_REBUILT)


def dropped(manifest: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in manifest.items() if name != key}


def emptied(folder: Path) -> None:
    for each in folder.iterdir():
        shutil.rmtree(each) if each.is_dir() else each.unlink()


def folder_as_file(stage: str) -> Callable[[Workspace], Flags]:
    def damage(workspace: Workspace) -> Flags:
        folder = folder_of(workspace, stage)
        shutil.rmtree(folder)
        folder.write_text("mine")
        return {}

    return damage


CASES = list(manifest_cases())
