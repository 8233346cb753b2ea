"""An output at a URL that several machines write together: each has a copy, and they exchange what they have written.

Nothing is exchanged while the machines train. At the points where a run on one machine would find the files of its
other processes in the folder, each machine uploads what it has changed, tells the others through the run's key-value
store, and downloads what they have changed. The first machine writes the index, which always describes a state that all
machines had together: a checkpoint whose parts are on several machines is in it as a whole or not at all.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from distill.errors import InputError
from pipelines.runs.console import Console
from pipelines.runs.manifest import SCRATCH
from pipelines.runs.processes import KeyValueStore, wait_for_key
from pipelines.runs.storage.mirror import Entry, Mirror, is_needed, remove_file

Changes = dict[str, Entry | None]  # path -> the file's new content, or None if it was removed


class SharedMirror(Mirror):
    """One machine's copy of an output that several machines write.

    Calls of `share` and `publish` are collective: each machine's first process makes the same calls in the same order.

    Args:
        url: URL of the output.
        console: Where it says what it copies.
        machine: Number of this machine; the first one writes the index.
        machines: Number of machines.
    """

    def __init__(self, url: str, console: Console, machine: int, machines: int):
        super().__init__(url, console, f"-{machine}" if machine else "")
        self.machine, self.machines = machine, machines
        self.synced: dict[str, Entry] = {}  # files of the copy here, as the other machines know them
        self.exchanges = 0

    def pull(self, *, writes: bool = True) -> None:
        """Makes the copy here what the index says, also where this machine has gone on since it was written.

        Raises:
            InputError: An object is missing or has another content than the index says; or the store can't be written.
        """
        self._record_state()  # so that no earlier index counts
        super().pull(writes=writes and self.machine == 0)
        self.synced = {path: entry for path, entry in self.entries.items() if (self.folder / path).is_file()}

    def share(self, store: KeyValueStore, unfinished: Path | None) -> None:
        """Brings files that other machines wrote here and the other way round.

        Files in the scratch folders of unfinished stages stay where they were written.

        Args:
            store: The store of the run.
            unfinished: A folder in a scratch folder whose files are brought here all the same.

        Raises:
            InputError: The store can't be read or written, another run has written to the output, or two machines have
                written different contents to a file.
        """
        changes = self._exchange(store)
        for path in find_removed(changes) & self.synced.keys():
            remove_file(self.folder, path)
            del self.synced[path]
        prefix = f"{unfinished.relative_to(self.folder).as_posix()}/" if unfinished is not None else None
        wanted = {path: entry for path, entry in self.entries.items() if self._is_wanted(path, prefix)}
        missing = {path: entry for path, entry in wanted.items() if self.synced.get(path) != entry}
        if missing:
            self._download(missing)
            self.synced |= missing
        self._gather(store, None)  # objects stay until every machine has read them

    def publish(self, store: KeyValueStore) -> None:
        """Brings what the machines have changed to the store, and to no other machine.

        Raises:
            InputError: The store can't be read or written, or another run has written to the output.
        """
        self._exchange(store)

    def _exchange(self, store: KeyValueStore) -> list[Changes]:
        """Uploads the changes of this machine and returns those of all; the index has them all at the end."""
        with self._hold_files() as (current, files):
            local_changes = find_changes(self.synced, current)
            changes = self._gather(store, local_changes)
            merged = merge_changes(self.entries, changes)
            self._upload({path: entry for path, entry in local_changes.items() if entry is not None}, files)
        self._gather(store, None)
        if merged != self.entries and self.machine == 0:
            self._check_alone()
            self._replace_index(merged)
        self.synced, self.entries = current, merged
        self._gather(store, None)
        return changes

    def _is_wanted(self, path: str, prefix: str | None) -> bool:
        is_scratch = SCRATCH in Path(path).parts and not (prefix and path.startswith(prefix))
        return is_needed(path, self.entries) and not is_scratch

    def _gather(self, store: KeyValueStore, changes: Changes | None) -> list[Changes]:
        """Returns the values of all machines; every machine calls it."""
        self.exchanges += 1
        name = f"output/{self.exchanges}"
        store.set(f"{name}/{self.machine}", json.dumps(changes))
        gathered = [json.loads(wait_for_key(store, f"{name}/{number}")) for number in range(self.machines)]
        return [{path: entry and Entry(*entry) for path, entry in (each or {}).items()} for each in gathered]

    def _record_state(self) -> None:
        """Records no index, since each also has files that only other machines have."""
        self.state.unlink(missing_ok=True)


def find_changes(before: Mapping[str, Entry], now: Mapping[str, Entry]) -> Changes:
    """Returns what has changed in a folder."""
    changed: Changes = {path: entry for path, entry in now.items() if before.get(path) != entry}
    return changed | dict.fromkeys(before.keys() - now.keys())


def merge_changes(entries: Mapping[str, Entry], changes: Iterable[Changes]) -> dict[str, Entry]:
    """Returns the files after the changes of all machines.

    Raises:
        InputError: Machines have written different contents to a file.
    """
    merged = dict(entries)
    written: dict[str, Entry] = {}
    for number, each in enumerate(changes):
        for path, entry in each.items():
            if entry is None:
                merged.pop(path, None)
            elif written.setdefault(path, entry) != entry:
                raise InputError(
                    f"output: expected {path!r} to be the same on all machines that wrote it, found another content on "
                    f"machine {number}: do all of them run the same version of Stillroom and its packages?"
                )
    return merged | written


def find_removed(changes: Iterable[Changes]) -> set[str]:
    """Returns the files that a machine has removed and none has written."""
    each_path = {path for each in changes for path in each}
    return {path for path in each_path if all(each.get(path) is None for each in changes)}
