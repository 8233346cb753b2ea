"""Forecasts the cost of a cache from measurements on a few batches, before it is written."""

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from distill.cache.format.identity import Identity
from distill.cache.format.shard import compress_record
from distill.cache.plan import Samples, group_batches
from distill.cache.signals import Signal, SignalMask, TeacherOutputs
from distill.cache.signals.rans import FrequencyTable
from distill.cache.signals.signal import Codebook, SignalRow
from distill.errors import InputError
from distill.losses.teacher_signals import SignalSource

Teacher = SignalSource
TIMED_BATCHES = 4
FITTED_BATCHES = 16  # if frequency tables are fitted as well
ROW_BYTES = 16 + 2 * 16  # the key, and its entries in the index and in the index's spare copy
SIGNAL_BYTES = 8 + 4  # end offset and checksum


@dataclass(frozen=True)
class Measurement:
    """Cost per token in the measured batches.

    Args:
        tokens: Number of tokens measured.
        token_bytes: Bytes on disk per token, without the fixed cost of a sample.
        token_seconds: Seconds per token in the teacher and the extraction of its signals.
        output_bytes: Largest size in memory of the teacher's outputs for a batch.
    """

    tokens: int
    token_bytes: float
    token_seconds: float
    output_bytes: int


@dataclass(frozen=True)
class Forecast:
    """Remaining cost: samples, tokens, bytes on disk, seconds, bytes of memory besides the teacher; free disk space."""

    samples: int
    tokens: int
    disk_bytes: int
    seconds: float
    memory_bytes: int
    free_bytes: int


def run_teacher(teacher: Teacher, samples: Samples, rows: Sequence[int]) -> TeacherOutputs:
    """Returns the teacher's outputs for some samples."""
    batch = samples.batch(rows)
    return TeacherOutputs(teacher(batch), SignalMask.from_batch(batch), [samples.keys[i] for i in rows])


def spread_batches(lengths: Sequence[int], batch_tokens: int, count: int) -> list[range]:
    """Returns up to `count` batches, evenly spaced over the plan."""
    batches = group_batches(lengths, batch_tokens)
    return [batches[i] for i in np.unique(np.linspace(0, len(batches) - 1, min(count, len(batches))).astype(int))]


def measure_cost(
    teacher: Teacher, samples: Samples, rows: Sequence[int], identity: Identity, batch_tokens: int
) -> tuple[Measurement, dict[str, Codebook]]:
    """Runs the teacher on a few batches spread over `rows`, measures the cost per token and fits the codebooks."""
    lengths = [int(samples.lengths[i]) for i in rows]
    count = FITTED_BATCHES if any(type(s).fit is not Signal.fit for s in identity.signals) else TIMED_BATCHES
    extracted: dict[str, list[SignalRow]] = {signal.name: [] for signal in identity.signals}
    seconds, tokens, largest = [], [], 0
    for batch in spread_batches(lengths, batch_tokens, count):
        start = time.perf_counter()
        outputs = run_teacher(teacher, samples, [rows[i] for i in batch])
        for signal in identity.signals:
            extracted[signal.name] += signal.rows(outputs)
        tokens.append(sum(lengths[i] for i in batch))
        seconds.append((time.perf_counter() - start) / tokens[-1])
        largest = max(largest, _count_tensor_bytes(outputs.tensors))
    codebooks: dict[str, Codebook] = {
        s.name: {name: FrequencyTable(starts) for name, starts in s.fit(extracted[s.name]).items()}
        for s in identity.signals
    }
    size = sum(
        len(compress_record(s.encode(row, codebooks[s.name]), identity))
        for s in identity.signals
        for row in extracted[s.name]
    )
    # The first batch also includes compilation and the allocation of memory that is then reused.
    token_seconds = float(np.median(seconds[1:] or seconds))
    return Measurement(sum(tokens), size / sum(tokens), token_seconds, largest), codebooks


def count_table_bytes(codebooks: Mapping[str, Codebook]) -> int:
    """Returns the size in bytes of the codebooks' frequency tables."""
    return sum(table.starts.nbytes for codebook in codebooks.values() for table in codebook.values())


def _count_tensor_bytes(values: object) -> int:
    """Returns the size in bytes of all tensors in nested containers."""
    if isinstance(values, Tensor):
        return values.numel() * values.element_size()
    if isinstance(values, Mapping):
        values = list(values.values())
    return sum(map(_count_tensor_bytes, values)) if isinstance(values, (list, tuple)) else 0


def forecast_cost(
    folder: Path, measurement: Measurement, lengths: np.ndarray, signals: int, shard_tokens: int, table_bytes: int = 0
) -> Forecast:
    """Returns the forecast for samples of these lengths and codebooks of `table_bytes`, which are stored twice."""
    tokens = int(lengths.sum())
    disk = tokens * measurement.token_bytes + len(lengths) * (ROW_BYTES + signals * SIGNAL_BYTES) + 2 * table_bytes
    memory = measurement.output_bytes * 2 + shard_tokens * measurement.token_bytes * 3
    return Forecast(
        len(lengths), tokens, int(disk), tokens * measurement.token_seconds, int(memory), free_bytes(folder)
    )


def free_bytes(folder: Path) -> int:
    """Returns the free disk space in bytes where the folder is or would be created."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def check_disk_space(folder: Path, expected: Forecast) -> None:
    """Checks that the disk can hold the cache.

    Raises:
        InputError: The disk is too small.
    """
    if expected.disk_bytes > expected.free_bytes:
        raise InputError(
            f"cache {str(folder)!r}: expected about {expected.disk_bytes / 1e9:.3g} GB for {expected.samples:,} "
            f"samples, found {expected.free_bytes / 1e9:.3g} GB free: the disk would be full before the end; free some "
            "space, store less (fewer draws, a smaller k, fewer layers), or write anyway with --force"
        )
