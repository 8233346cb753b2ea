"""An output folder of this machine that is kept in an object store, so that another machine can go on with it.

Finished stages and published files have their names in the store. Files of stages that aren't finished, checkpoints
among them, and files in the output's folder itself are stored under their content hashes, because they change: until
the index is replaced, the one that is there needs their earlier contents. An index, written last, says which files the
output has and what they contain: a machine that reads it gets them as they were at one moment. Copies of the files in
the output's folder itself, such as the report, have their names in the store for people who look there.
"""

import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from distill.checkpoint.digest import hash_file
from distill.errors import InputError
from pipelines.runs.background import run_in_background
from pipelines.runs.console import Console, print_error
from pipelines.runs.files import write_json
from pipelines.runs.manifest import MANIFEST
from pipelines.runs.publication import link_or_copy
from pipelines.runs.storage.remote import RemoteFolder, check_inside, find_cache, shorten

MIRRORS = "outputs"  # folder in the cache
OWN = ".stillroom"  # folder of index and objects
INDEX, OBJECTS = f"{OWN}/index.json", f"{OWN}/objects"
STATE = "mirror.json"  # beside the local folder: the index that it was last in step with
SNAPSHOT = "snapshot"  # folder beside the local one, during a push
SNAPSHOT_TRIES, SNAPSHOT_SECONDS = 50, 0.02
CHECKPOINT = ".ckpt"  # end of the names of checkpoints' folders
LOOK_SECONDS = 2.0  # between two looks for new checkpoints and stages
STAGE_DEPTH = 2  # of a stage's folder: its name and its key
LOCK = ".lock"  # of the output, which is of use here only
_UNFINISHED = ".partial"  # in the names of folders of stages that aren't finished, and of files being written


class Entry(NamedTuple):
    """A file of the output: its bytes, the hash of its content, and the object that has it."""

    size: int
    sha256: str
    stored: str


class Mirror:
    """An output folder here and in the store.

    Args:
        url: URL of the output.
        console: Where it says what it copies.
        suffix: End of the name of the local copy's folder, for machines that share their home folder.
    """

    def __init__(self, url: str, console: Console, suffix: str = ""):
        self.remote, self.console = RemoteFolder(url, "output"), console
        root = find_cache() / MIRRORS / f"{hashlib.sha256(self.remote.url.encode()).hexdigest()[:16]}{suffix}"
        self.folder, self.state = root / self.remote.url.rpartition("/")[2], root / STATE
        self.serial, self.entries = "", dict[str, Entry]()  # of the index that the folder is in step with
        self.seen: dict[str, tuple[int, int]] = {}  # size and time of change of the files when they were hashed
        self.hashes: dict[str, str] = {}

    def pull(self, *, writes: bool = True) -> None:
        """Makes the folder here that of the store, unless this machine was the last to write there.

        Args:
            writes: Whether the output will be written to: a new one begins with an empty index, so that a missing
                permission shows before the run.

        Raises:
            InputError: An object is missing or has another content than the index says; or the store can't be written.
        """
        index = self.remote.read(INDEX)
        if index is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            if writes:
                self._write_index({})
                self._record_state()
            return
        self.serial, self.entries = self._parse_index(index)
        known = json.loads(self.state.read_text())["serial"] if self.state.exists() else ""
        if known == self.serial and self.folder.is_dir():
            return
        wanted = {path: entry for path, entry in self.entries.items() if is_needed(path, self.entries)}
        for path in list_kept_files(self.folder).keys() - wanted.keys():
            remove_file(self.folder, path)
        self._download({path: entry for path, entry in wanted.items() if not self._has(path, entry)})
        self.folder.mkdir(parents=True, exist_ok=True)
        self._record_state()

    def push(self) -> None:
        """Brings the store up to date.

        Raises:
            InputError: Another machine has written to the output since.
        """
        self._check_alone()
        with self._hold_files() as (entries, files):
            if entries == self.entries:
                return
            self._upload(entries, files)
            self._replace_index(entries)
            self._record_state()

    @contextmanager
    def keep_pushed(self) -> Iterator[None]:
        """Pushes finished stages and new checkpoints during the block, and everything at its end, however it ends."""
        try:
            with run_in_background(self._push_until, "output"):
                yield
        finally:
            self.push()
            self.console.say(f"  output: {self.remote.url}, and here {self.folder}")

    def _push_until(self, is_over: threading.Event) -> None:
        pushed: set[str] = set()
        while not is_over.wait(LOOK_SECONDS):
            marks = list_marks(self.folder)
            if marks - pushed:
                try:
                    self.push()
                    pushed = marks
                except (InputError, OSError) as error:
                    # The run continues; the last push at its end raises the error again.
                    print_error(str(error))

    def _parse_index(self, content: bytes) -> tuple[str, dict[str, Entry]]:
        """Returns the number and the files of an index.

        Raises:
            InputError: It is damaged, or names files outside the output.
        """
        try:
            index = json.loads(content)
            entries = {path: Entry(*entry) for path, entry in index["files"].items()}
            serial = str(index["serial"])
        except (ValueError, TypeError, LookupError) as error:
            raise InputError(
                f"output {self.remote.name(INDEX)!r}: expected an index of the output's files, found "
                f"{len(content)} bytes that can't be read as one ({shorten(error)}); remove it to begin anew"
            ) from error
        check_inside(entries)
        return serial, entries

    def _has(self, path: str, entry: Entry) -> bool:
        file = self.folder / path
        return file.is_file() and file.stat().st_size == entry.size and hash_file(file) == entry.sha256

    def _check_alone(self) -> None:
        """Checks that nobody else has written to the output.

        Raises:
            InputError: Someone has.
        """
        index = self.remote.read(INDEX)
        serial, _ = self._parse_index(index) if index is not None else ("", {})
        if serial != self.serial:
            raise InputError(
                f"output {self.remote.url!r}: expected to be the only run that writes there, found that another one "
                f"has since; what was made here is in {str(self.folder)!r}"
            )

    @contextmanager
    def _hold_files(self) -> Iterator[tuple[dict[str, Entry], dict[str, Path]]]:
        """Yields the folder's files as they are now, and path -> file with this content that stays during the block."""
        snapshot = self.state.with_name(SNAPSHOT)
        try:
            files = take_snapshot(self.folder, snapshot)
            yield self._read_entries(files), files
        finally:
            shutil.rmtree(snapshot, ignore_errors=True)

    def _upload(self, entries: Mapping[str, Entry], files: Mapping[str, Path]) -> None:
        """Uploads the files whose objects the store doesn't have, and copies under their names."""
        stored = {entry.stored: entry.sha256 for entry in self.entries.values()}
        for path, entry in entries.items():
            if stored.get(entry.stored) != entry.sha256:
                self.remote.upload(files[path], entry.stored)
            if has_copy(path) and self.entries.get(path) != entry:
                self.remote.upload(files[path], path)

    def _download(self, entries: Mapping[str, Entry]) -> None:
        """Downloads files, whose content is checked.

        Raises:
            InputError: An object is missing or has another content than the index says.
        """
        size = sum(entry.size for entry in entries.values())
        title = f"output: reading {len(entries)} files from {self.remote.url}"
        with self.console.track(title, size, "bytes") as advance:
            for path, entry in entries.items():
                self._download_file(path, entry)
                advance(entry.size)

    def _download_file(self, path: str, entry: Entry) -> None:
        file = self.folder / path
        self.remote.download(entry.stored, file)
        digest = hash_file(file)
        if digest != entry.sha256:
            file.unlink()
            raise InputError(
                f"output {self.remote.name(entry.stored)!r}: expected SHA-256 {entry.sha256[:12]}, found {digest[:12]}"
                f": the object was changed or damaged; restore it, or remove {self.remote.name(INDEX)} to begin anew"
            )

    def _read_entries(self, files: Mapping[str, Path]) -> dict[str, Entry]:
        """Returns the files of a snapshot; those that are unchanged since the last one aren't read again."""
        entries = {}
        for path, file in files.items():
            status = file.stat()
            if self.seen.get(path) != (status.st_size, status.st_mtime_ns):
                self.hashes[path], self.seen[path] = hash_file(file), (status.st_size, status.st_mtime_ns)
            sha256 = self.hashes[path]
            is_object = is_unfinished(path) or has_copy(path)
            entries[path] = Entry(status.st_size, sha256, f"{OBJECTS}/{sha256}" if is_object else path)
        return entries

    def _write_index(self, entries: Mapping[str, Entry]) -> None:
        serial = uuid4().hex
        content = {"serial": serial, "files": {path: list(entry) for path, entry in entries.items()}}
        self.remote.write(INDEX, json.dumps(content, indent=1).encode())
        self.serial, self.entries = serial, dict(entries)

    def _replace_index(self, entries: Mapping[str, Entry]) -> None:
        """Writes an index and then removes the objects that only the earlier one has."""
        before = list_objects(self.entries)
        self._write_index(entries)
        self.remote.remove(before - list_objects(entries))

    def _record_state(self) -> None:
        """Records which index the folder here agrees with."""
        write_json(self.state, {"serial": self.serial})


def remove_file(folder: Path, path: str) -> None:
    """Removes a file of a folder, and the folders that are empty without it: an empty one isn't a checkpoint."""
    (folder / path).unlink()
    for parent in (folder / path).parents:
        if parent == folder or any(parent.iterdir()):
            return
        parent.rmdir()


def is_unfinished(path: str) -> bool:
    """Returns whether a file belongs to a stage that isn't finished."""
    return any(part.endswith(_UNFINISHED) for part in Path(path).parts[:-1])


def has_copy(path: str) -> bool:
    """Returns whether a file is in the output's folder itself: the store has its content, and a copy with its name."""
    return len(Path(path).parts) == 1


def list_objects(entries: Mapping[str, Entry]) -> set[str]:
    """Returns the names of all objects of an index's files."""
    return {entry.stored for entry in entries.values()} | {path for path in entries if has_copy(path)}


def is_needed(path: str, entries: Mapping[str, Entry]) -> bool:
    """Returns whether a run on another machine needs a file: those of stages, and in the output's folder itself.

    What was published is made again from the stages.
    """
    parts = Path(path).parts
    return len(parts) < 2 or is_unfinished(path) or "/".join((*parts[:2], MANIFEST)) in entries


def take_snapshot(folder: Path, snapshot: Path) -> dict[str, Path]:
    """Returns path -> file of an output at one moment: files that may change or be removed are linked or copied first.

    Training replaces checkpoints faster than they can be uploaded.

    Raises:
        FileNotFoundError: Files vanished again and again.
    """
    for left in reversed(range(SNAPSHOT_TRIES)):
        shutil.rmtree(snapshot, ignore_errors=True)
        try:
            return {path: _link_or_copy(folder, path, snapshot) for path in list_kept_files(folder)}
        except FileNotFoundError:
            if not left:
                raise
            time.sleep(SNAPSHOT_SECONDS)
    raise AssertionError


def _link_or_copy(folder: Path, path: str, snapshot: Path) -> Path:
    """Returns a file with this content that stays: the file itself in a finished stage, else a link or a copy of it."""
    file, parts = folder / path, Path(path).parts
    if len(parts) > STAGE_DEPTH and not is_unfinished(path) and (folder / parts[0] / parts[1] / MANIFEST).exists():
        return file
    target = snapshot / path
    target.parent.mkdir(parents=True, exist_ok=True)
    if any(part.endswith(CHECKPOINT) for part in parts):  # written once
        link_or_copy(file, target)
    else:
        shutil.copy2(file, target)
    return target


def list_kept_files(folder: Path) -> dict[str, tuple[int, int]]:
    """Returns path -> (size, time of the last change) of the files that are kept.

    Raises:
        FileNotFoundError: A file vanished meanwhile.
    """
    files = {}
    for parent, folders, names in os.walk(folder):
        if len(Path(parent).relative_to(folder).parts) >= STAGE_DEPTH:  # a checkpoint that is being written
            folders[:] = [name for name in folders if not name.endswith(_UNFINISHED)]
        for name in names:
            file = Path(parent, name)
            if name != LOCK and not name.endswith(_UNFINISHED):
                status = file.stat()
                files[file.relative_to(folder).as_posix()] = (status.st_size, status.st_mtime_ns)
    return files


def list_marks(folder: Path) -> set[str]:
    """Returns the names of finished stages and checkpoints: what is worth a push."""
    patterns = f"*/*/{MANIFEST}", f"*/*/*/*/*{CHECKPOINT}"
    marks: set[str] = set()
    with suppress(FileNotFoundError):
        marks = {str(file) for pattern in patterns for file in folder.glob(pattern)}
    return marks
