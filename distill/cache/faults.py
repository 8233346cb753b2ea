"""Missing and damaged shards of a cache, as a writer finds them before it starts."""

from dataclasses import dataclass

from distill.cache.format.shard import DamagedError, Shard, shard_path
from distill.cache.format.store import Store

_MISSING = 0


@dataclass(frozen=True)
class ShardFault:
    """A shard that has to be written.

    Args:
        number: Number of the shard.
        reason: What is wrong with the file, or that it is missing.
        modified: Modification time of the damaged file in nanoseconds, 0 for a missing one. A file with another
            time has been published since, by a writer that checked it.
    """

    number: int
    reason: str
    modified: int

    @property
    def is_damage(self) -> bool:
        """Whether there was a file."""
        return self.modified != _MISSING


def find_faults(store: Store) -> list[ShardFault]:
    """Reads every shard completely and returns the missing and the damaged ones."""
    faults = (find_fault(store, number) for number in range(len(store.shard_rows)))
    return [fault for fault in faults if fault is not None]


def find_fault(store: Store, number: int) -> ShardFault | None:
    """Returns the fault of a shard, after reading all of it; None if it is intact."""
    modified = modification_time(store, number)
    try:
        damage = open_shard(store, number).find_damage(store.index.shard_prefixes(number))
    except DamagedError as error:
        return ShardFault(number, str(error), modified)
    if not damage:
        return None
    rows = {row for each in damage for row in each.rows}
    name = shard_path(store.folder, number).name
    return ShardFault(number, f"{name}: {len(rows)} samples damaged, {damage[0].reason}", modified)


def is_published(store: Store, fault: ShardFault) -> bool:
    """Returns whether another writer has published the shard since the fault was found; only its header is read."""
    if modification_time(store, fault.number) in (_MISSING, fault.modified):
        return False
    try:
        open_shard(store, fault.number)
    except DamagedError:
        return False
    return True


def modification_time(store: Store, number: int) -> int:
    """Returns the modification time of a shard's file in nanoseconds, 0 if there is none."""
    try:
        return shard_path(store.folder, number).stat().st_mtime_ns
    except FileNotFoundError:
        return _MISSING


def open_shard(store: Store, number: int) -> Shard:
    """Opens a shard.

    Raises:
        DamagedError: The file is missing, too short, not a shard, or belongs to another number or cache.
    """
    return Shard(store.folder, number, store.shard_rows[number], store.identity)
