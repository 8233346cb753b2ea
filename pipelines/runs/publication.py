"""A folder that every run of an output publishes again, and in which users may store files of their own."""

import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from distill.errors import InputError
from pipelines.runs.files import file_hashes, write_json
from pipelines.runs.manifest import sha256

RECORD = "published.json"  # beside the folder: hashes of all contents ever published under each name
KEPT = ".yours"  # appended to the name of a user's file if a published file has the same name

Record = dict[str, list[str]]


@contextmanager
def republished(folder: Path, say: Callable[[str], None]) -> Iterator[Path]:
    """Yields a new folder to fill, which replaces `folder` when the block ends without an error.

    Files published in `folder` earlier are removed; all other files belong to the user and are retained. Links are not
    followed.

    Raises:
        InputError: `folder` is a file or a link.
    """
    check_publishable(folder)
    fresh, old = folder.with_name(f".{folder.name}.new"), folder.with_name(f".{folder.name}.old")
    if os.path.lexists(old) and not os.path.lexists(folder):
        old.rename(folder)  # a run was killed between the two renames below
    for leftover in (fresh, old):
        discard(leftover)
    fresh.mkdir(parents=True)
    yield fresh
    hashes = file_hashes(fresh)
    record = read_record(folder.parent / RECORD)
    own = own_files(folder, record, hashes) if folder.is_dir() else []
    # Written before the rename, so that published contents are known even after a kill in between.
    write_json(folder.parent / RECORD, joined(record, folder.name, hashes))
    carry(own, folder, fresh, say)
    if folder.is_dir():
        folder.rename(old)
    fresh.rename(folder)
    discard(old)


def check_publishable(folder: Path) -> None:
    """Checks that a folder can be published at this path.

    Raises:
        InputError: The path is a file or a link.
    """
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        what = f"a link to {str(folder.readlink())!r}" if folder.is_symlink() else "a file"
        raise InputError(
            f"output {str(folder)!r}: expected a folder, or nothing, to publish in, found {what}: nothing was written "
            "there or removed; move it elsewhere and run the same command again, what was computed is kept"
        )


def own_files(folder: Path, record: Mapping[str, Sequence[str]], hashes: Mapping[str, str]) -> list[str]:
    """Returns the names of files and links in a published folder that no run wrote or that were changed since."""
    found = []
    for place, folders, files in os.walk(folder):
        links = [name for name in folders if (Path(place) / name).is_symlink()]
        for path in (Path(place) / name for name in (*files, *links)):
            name = str(path.relative_to(folder))
            known = {*record.get(f"{folder.name}/{name}", ()), hashes.get(name)}
            if not stat.S_ISREG(path.lstat().st_mode) or sha256(path) not in known:
                found.append(name)
    return sorted(found)


def carry(own: Sequence[str], folder: Path, fresh: Path, say: Callable[[str], None]) -> None:
    """Links or copies the user's files into the new folder, starting with those whose names are free."""
    for name in sorted(own, key=lambda name: os.path.lexists(fresh / name)):
        place = free_place(fresh, Path(name))
        place.parent.mkdir(parents=True, exist_ok=True)
        link_or_copy(folder / name, place)
        kept = str(place.relative_to(fresh))
        if kept != name:
            say(f"  {folder.name}: {name} isn't as it was published; yours is kept as {kept}")
    if own:
        more = ", …" if len(own) > 3 else ""
        say(f"  {folder.name}: {len(own)} files of your own stay ({', '.join(own[:3])}{more})")


def free_place(fresh: Path, name: Path) -> Path:
    """Returns the file's path in `fresh`, with a suffix on each name that is taken."""
    place = fresh
    for part in name.parts[:-1]:
        place /= part
        while os.path.lexists(place) and not place.is_dir():
            place = place.with_name(f"{place.name}{KEPT}")
    place /= name.name
    while os.path.lexists(place):
        place = place.with_name(f"{place.name}{KEPT}")
    return place


def read_record(file: Path) -> Record:
    """Returns the record of published contents; empty if it is missing or damaged.

    With an empty record all files that aren't published again are treated as the user's, and are retained.
    """
    try:
        content = json.loads(file.read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    pairs = content.items() if isinstance(content, dict) else ()
    return {name: each for name, each in pairs if isinstance(each, list) and all(isinstance(x, str) for x in each)}


def joined(record: Record, folder: str, hashes: Mapping[str, str]) -> Record:
    added = {f"{folder}/{name}": each for name, each in hashes.items()}
    return record | {name: sorted({*record.get(name, ()), each}) for name, each in added.items()}


def link_tree(source: Path, target: Path) -> None:
    """Copies a folder, with hard links if possible."""
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_dir():
            link_tree(file, target / file.name)
        else:
            link_or_copy(file, target / file.name)


def link_or_copy(source: Path, target: Path) -> None:
    """Creates a hard link, or a copy if the file system doesn't support hard links.

    Of a symbolic link, the link itself is copied.
    """
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def discard(path: Path) -> None:
    """Removes a file or folder; of a link, only the link itself."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
