"""A folder that every run of an output publishes again, and in which users may store files of their own."""

import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from distill.errors import InputError
from pipelines.runs.files import fresh_path, hash_files, old_path, recover_folder, remove_path, write_json
from pipelines.runs.manifest import hash_file

RECORD = "published.json"  # beside the folder: hashes of all contents ever published under each name
USER_SUFFIX = ".yours"  # appended to the name of a user's file if a published file has the same name

Record: TypeAlias = dict[str, list[str]]  # "folder/name" of a file -> SHA-256 of each published content


@contextmanager
def republish_folder(folder: Path, say: Callable[[str], None]) -> Iterator[Path]:
    """Yields a new folder to fill, which replaces `folder` when the block ends without an error.

    Files published in `folder` earlier are removed; all other files belong to the user and are retained. Links are not
    followed.

    Raises:
        InputError: `folder` is a file or a link.
    """
    check_publishable(folder)
    recover_folder(folder)
    fresh, old = fresh_path(folder), old_path(folder)
    remove_path(fresh)
    fresh.mkdir(parents=True)
    yield fresh
    hashes = hash_files(fresh)
    record = read_record(folder.parent / RECORD)
    user_files = find_user_files(folder, record, hashes) if folder.is_dir() else []
    # Written before the rename, so that published contents are known even after a kill in between.
    write_json(folder.parent / RECORD, extend_record(record, folder.name, hashes))
    keep_user_files(user_files, folder, fresh, say)
    if folder.is_dir():
        folder.rename(old)
    fresh.rename(folder)
    remove_path(old)


def check_publishable(folder: Path) -> None:
    """Checks that a folder can be published at this path.

    Raises:
        InputError: The path is a file or a link.
    """
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        kind = f"a link to {str(folder.readlink())!r}" if folder.is_symlink() else "a file"
        raise InputError(
            f"output {str(folder)!r}: expected a folder to publish in, or none yet, found {kind}: nothing was written "
            "or removed; move it elsewhere and run the same command again, which reuses all finished stages"
        )


def find_user_files(folder: Path, record: Mapping[str, Sequence[str]], hashes: Mapping[str, str]) -> list[str]:
    """Returns the names of files and links in a published folder that no run wrote or that were changed since."""
    names = []
    for parent, folders, files in os.walk(folder):
        links = [name for name in folders if (Path(parent) / name).is_symlink()]
        for path in (Path(parent) / name for name in (*files, *links)):
            name = str(path.relative_to(folder))
            published = {*record.get(f"{folder.name}/{name}", ()), hashes.get(name)}
            if not stat.S_ISREG(path.lstat().st_mode) or hash_file(path) not in published:
                names.append(name)
    return sorted(names)


def keep_user_files(names: Sequence[str], folder: Path, fresh: Path, say: Callable[[str], None]) -> None:
    """Links or copies the user's files into the new folder, starting with those whose names are free."""
    for name in sorted(names, key=lambda name: os.path.lexists(fresh / name)):
        path = find_free_path(fresh, Path(name))
        path.parent.mkdir(parents=True, exist_ok=True)
        link_or_copy(folder / name, path)
        new_name = str(path.relative_to(fresh))
        if new_name != name:
            say(f"  {folder.name}: {name} was changed since it was published; your version is kept as {new_name}")
    if names:
        more = ", …" if len(names) > 3 else ""
        say(f"  {folder.name}: {len(names)} files of your own are kept ({', '.join(names[:3])}{more})")


def find_free_path(fresh: Path, name: Path) -> Path:
    """Returns the file's path in `fresh`, with a suffix on each name that is taken."""
    path = fresh
    for part in name.parts[:-1]:
        path /= part
        while os.path.lexists(path) and not path.is_dir():
            path = path.with_name(f"{path.name}{USER_SUFFIX}")
    path /= name.name
    while os.path.lexists(path):
        path = path.with_name(f"{path.name}{USER_SUFFIX}")
    return path


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


def extend_record(record: Record, folder: str, hashes: Mapping[str, str]) -> Record:
    """Returns the record with the hashes of the files that are now published in a folder."""
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
