"""Writes the signals of a set of samples; several writers may run at once, and each resumes where others stopped."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from distill.cache.faults import ShardFault, find_faults, is_published, open_shard
from distill.cache.format.identity import Identity
from distill.cache.format.index import key_array
from distill.cache.format.shard import DamagedError, claim_file, publish_shard, shard_bytes, shard_path
from distill.cache.format.store import (
    CACHE_JSON,
    SPARE,
    CacheMetadata,
    Store,
    lock_plan,
    lost_file_error,
    open_store,
    remove_partial_files,
    repair_files,
)
from distill.cache.plan import BATCH_TOKENS, Samples, assign_shards, build_index, group_batches, select_new_rows
from distill.cache.preflight import (
    Forecast,
    Teacher,
    check_disk_space,
    count_table_bytes,
    forecast_cost,
    measure_cost,
    run_teacher,
)
from distill.cache.signals.signal import SignalRow
from distill.errors import InputError

_POLL_SECONDS = 0.2
CACHE_FILE_PREFIXES = ("cache.", "codebook.", "index-", "shard-", SPARE)


@dataclass(frozen=True)
class WriteResult:
    """Result of a call of `write_cache`.

    Args:
        samples: Number of distinct samples in the cache.
        computed_shards: Number of shards that this writer computed, wholly or in part.
        reused_shards: Number of shards that already existed or that another writer computed.
        queried_samples: Number of samples for which this writer ran the teacher, without those of the initial
            measurement.
        damaged_shards: For each shard that had to be repaired, the reason.
    """

    samples: int
    computed_shards: int
    reused_shards: int
    queried_samples: int
    damaged_shards: tuple[str, ...]


def write_cache(
    folder: Path,
    identity: Identity,
    samples: Samples,
    teacher: Teacher,
    *,
    rank: int = 0,
    ranks: int = 1,
    batch_tokens: int = BATCH_TOKENS,
    force: bool = False,
    made_from: Mapping[str, object] | None = None,
    lockstep: bool = False,
    on_forecast: Callable[[Forecast], None] = lambda expected: None,
    on_progress: Callable[[int], None] = lambda samples: None,
) -> WriteResult:
    """Computes and stores the signals of every distinct sample that has none yet, and repairs damaged shards.

    Args:
        folder: The cache's folder, which need not exist.
        identity: Identity of the cache: what the signals are computed from.
        samples: Samples whose signals are requested; other samples of an existing cache are left unchanged.
        teacher: Maps a padded batch to the tensors that the signals need.
        rank: Determines, with `ranks`, the shard at which this writer starts; shards aren't assigned by rank, but
            claimed one by one.
        ranks: Number of writers.
        batch_tokens: Tokens per batch of the teacher, including padding; an existing cache keeps its own setting.
        force: Write even if the disk is too small.
        made_from: Stored in cache.json for users and for `rebuild`.
        lockstep: Compute every `ranks`-th shard without waiting for other writers, for a teacher that computes only
            while all processes call it (see `ShardedTeacher`); if the cache isn't planned yet, call `plan_cache` first.
        on_forecast: Called with the forecast for samples that are new to the cache, before anything is written.
        on_progress: Called with the number of samples done since the last call.

    Raises:
        InputError: The folder holds another cache or other files, the teacher's outputs are not finite, the disk is too
            small, cache.json, index or codebook are lost with their spare copies, or a missing or damaged shard holds
            samples that are not among `samples`.
    """
    store = plan_cache(
        folder, identity, samples, teacher,
        batch_tokens=batch_tokens, force=force, made_from=made_from, on_forecast=on_forecast,
    )  # fmt: skip
    return fill_cache(
        store, samples, teacher, find_faults(store), rank=rank, ranks=ranks, lockstep=lockstep, on_progress=on_progress
    )


def fill_cache(
    store: Store,
    samples: Samples,
    teacher: Teacher,
    faults: Sequence[ShardFault],
    *,
    rank: int = 0,
    ranks: int = 1,
    lockstep: bool = False,
    on_progress: Callable[[int], None] = lambda samples: None,
) -> WriteResult:
    """Writes the shards with `faults`, which one of several writers can find for all of them.

    Args:
        store: The cache, with a place for every sample, from `plan_cache` or `open_store`.
        samples: See `write_cache`.
        teacher: See `write_cache`.
        faults: From `find_faults`.
        rank: See `write_cache`.
        ranks: See `write_cache`.
        lockstep: See `write_cache`.
        on_progress: See `write_cache`.

    Raises:
        InputError: The teacher's outputs are not finite, or a shard holds samples that are not among `samples`.
    """
    writer = _Writer(store, samples, teacher)
    assigned = [fault for fault in faults if not lockstep or fault.number % ranks == rank]
    on_progress(len(store.index) - sum(store.shard_rows[fault.number] for fault in assigned))
    start = 0 if lockstep else rank * len(assigned) // ranks
    computed = writer.write([*assigned[start:], *assigned[:start]], on_progress)
    damaged = tuple(fault.reason for fault in faults if fault.is_damage)
    return WriteResult(len(store.index), computed, len(store.shard_rows) - computed, writer.queried_samples, damaged)


def plan_cache(
    folder: Path,
    identity: Identity,
    samples: Samples,
    teacher: Teacher,
    *,
    batch_tokens: int = BATCH_TOKENS,
    force: bool = False,
    made_from: Mapping[str, object] | None = None,
    on_forecast: Callable[[Forecast], None] = lambda expected: None,
) -> Store:
    """Assigns every sample a place in the cache, without signals; arguments and errors are those of `write_cache`."""

    def approve(expected: Forecast) -> None:
        on_forecast(expected)
        if not force:
            check_disk_space(folder, expected)

    return _plan_store(folder, identity, samples, teacher, batch_tokens, made_from or {}, approve)


def _plan_store(
    folder: Path,
    identity: Identity,
    samples: Samples,
    teacher: Teacher,
    batch_tokens: int,
    made_from: Mapping[str, object],
    approve: Callable[[Forecast], None],
) -> Store:
    """Returns a store with a place for every sample: a new one, or the existing one with added shards.

    `approve` is called with the forecast for the new samples before anything is written.
    """
    _check_folder(folder)
    with lock_plan(folder):
        store = None
        if (folder / CACHE_JSON).exists() or (folder / SPARE / CACHE_JSON).exists():
            repair_files(folder)
            store = open_store(folder, identity)
        elif any(folder.glob("shard-*.safetensors")):
            # A new plan might attribute the existing shards to other samples.
            raise lost_file_error(folder, CACHE_JSON)
        remove_partial_files(folder)
        rows = select_new_rows(samples, store.index.contains if store else None)
        if store is not None and not rows:
            return store
        if not rows:
            raise InputError(f"cache {str(folder)!r}: expected samples, found none: there is nothing to write")
        lengths = np.asarray([samples.lengths[i] for i in rows], np.int64)
        added = assign_shards(lengths, identity.signals)
        index = build_index(samples, rows, added, len(store.shard_rows) if store else 0)
        batch_tokens = store.batch_tokens if store else batch_tokens
        measurement, codebooks = measure_cost(teacher, samples, rows, identity, batch_tokens)
        tokens = int(lengths.sum())
        tables = 0 if store else count_table_bytes(codebooks)
        approve(forecast_cost(folder, measurement, lengths, len(identity.signals), tokens // len(added), tables))
        if store is None:
            # No timestamps: the same samples and teacher produce identical files, including this one.
            metadata: CacheMetadata = {"tokens": tokens, "made_from": dict(made_from)}
            store = Store(folder, identity, tuple(added), batch_tokens, index, codebooks, metadata)
        else:
            metadata = {**store.metadata, "tokens": store.metadata["tokens"] + tokens}
            shard_rows = (*store.shard_rows, *added)
            store = replace(store, shard_rows=shard_rows, index=store.index.merge(index), metadata=metadata)
        store.save()
        return store


def _check_folder(folder: Path) -> None:
    """Creates the folder, or checks that it holds only a cache.

    Raises:
        InputError: The folder holds other files.
    """
    if folder.exists():
        others = [
            f.name for f in folder.iterdir() if not f.name.startswith(CACHE_FILE_PREFIXES) and f.suffix != ".partial"
        ]
        if others:
            raise InputError(f"cache {str(folder)!r}: the folder holds something else; nothing was written")
    folder.mkdir(parents=True, exist_ok=True)


class _Writer:
    """Computes and writes shards of an opened cache."""

    def __init__(self, store: Store, samples: Samples, teacher: Teacher):
        self.store, self.samples, self.teacher = store, samples, teacher
        self.queried_samples = 0
        self.rows_of_prefix: dict[int, int] = {}
        for row, key in reversed(list(enumerate(samples.keys))):
            self.rows_of_prefix[int.from_bytes(key[:8], "little")] = row

    def sample_rows(self, number: int) -> list[int]:
        """Returns the sample number of each row of a shard.

        Raises:
            InputError: A sample of the shard isn't among the writer's samples.
        """
        prefixes = self.store.index.shard_prefixes(number)
        rows = [self.rows_of_prefix.get(int(prefix), -1) for prefix in prefixes]
        missing = rows.count(-1)
        if missing:
            raise InputError(
                f"cache {str(self.store.folder)!r}: shard {number} is missing or damaged; expected its {len(rows)} "
                f"samples in the data, found {missing} missing: they can't be computed again without their text"
            )
        return rows

    def lengths(self, rows: Sequence[int]) -> np.ndarray:
        """Returns the number of tokens of some samples, int64 [rows]."""
        return np.asarray([self.samples.lengths[i] for i in rows], np.int64)

    def write(self, faults: Sequence[ShardFault], on_progress: Callable[[int], None]) -> int:
        """Writes the shards that no other writer has claimed, waits for the others, and returns how many it wrote."""
        computed, pending = 0, list(faults)
        with ThreadPoolExecutor(1) as coder:
            while pending:
                states = [(fault, self.write_shard(fault, coder, on_progress)) for fault in pending]
                computed += sum(state == "computed" for _, state in states)
                pending = [fault for fault, state in states if state == "claimed"]
                if pending:
                    time.sleep(_POLL_SECONDS)
        for partial in self.store.folder.glob("shard-*.partial"):
            with claim_file(partial):  # from a killed process: claiming and releasing the file removes it
                pass
        return computed

    def write_shard(self, fault: ShardFault, coder: ThreadPoolExecutor, on_progress: Callable[[int], None]) -> str:
        """Writes a shard unless another writer does.

        Returns `computed` (here), `published` (by another writer) or `claimed` (by another writer).
        """
        path = shard_path(self.store.folder, fault.number)
        with claim_file(path) as file:
            if is_published(self.store, fault):
                on_progress(self.store.shard_rows[fault.number])
                return "published"
            if file is None:
                return "claimed"
            publish_shard(file, path, self.compute(fault.number, coder, on_progress))
            return "computed"

    def compute(self, number: int, coder: ThreadPoolExecutor, on_progress: Callable[[int], None]) -> bytes:
        """Returns the shard's bytes; the teacher recomputes every batch that has a missing or damaged record."""
        rows, signals = self.sample_rows(number), self.store.identity.signals
        intact = self.read_intact(number)
        batches: list[tuple[range, Future[list[list[bytes]]] | None]] = []
        for batch in group_batches(self.lengths(rows), self.store.batch_tokens):
            if all(row in intact for row in batch):
                batches.append((batch, None))
            else:
                outputs = run_teacher(self.teacher, self.samples, [rows[i] for i in batch])
                extracted = [signal.rows(outputs) for signal in signals]
                batches.append((batch, coder.submit(self.encode, extracted)))
                self.queried_samples += len(batch)
            on_progress(len(batch))
        records: dict[str, list[bytes]] = {signal.name: [] for signal in signals}
        for batch, future in batches:
            encoded = future.result() if future is not None else None
            for i, signal in enumerate(signals):
                records[signal.name] += encoded[i] if encoded else [intact[row][i] for row in batch]
        return shard_bytes(self.store.identity, number, key_array([self.samples.keys[i] for i in rows]), records)

    def encode(self, extracted: Sequence[Sequence[SignalRow]]) -> list[list[bytes]]:
        """Returns the encoded records by signal, then sample."""
        pairs = zip(self.store.identity.signals, extracted, strict=True)
        return [
            [signal.encode(row, self.store.codebooks.get(signal.name, {})) for row in rows] for signal, rows in pairs
        ]

    def read_intact(self, number: int) -> dict[int, list[bytes]]:
        """Returns the intact records of a damaged shard by row, each row's in the order of the signals."""
        try:
            shard = open_shard(self.store, number)
        except DamagedError:
            return {}
        damages = shard.find_damage(self.store.index.shard_prefixes(number))
        damaged = {row for each in damages if len(each.rows) == 1 for row in each.rows}
        names = [signal.name for signal in self.store.identity.signals]
        intact = [row for row in range(shard.rows) if row not in damaged]
        return {row: [bytes(shard.record(row, name)) for name in names] for row in intact}
