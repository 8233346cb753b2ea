"""Time and memory of the index of a cache of ten million samples.

    python -m benchmarks.cache.index --samples 10000000

The samples are synthetic, two numbers each, written by the same writer as any cache. Printed are: the time to write the
cache; the median time to open it in a fresh process, with its files in the page cache; the bytes of the index per
sample, and its size if every page of it were resident; and the time to find a sample's location and to read, check and
decode its record, per sample of a batch of 32. Every sample that is read is compared with what was written. The
index needs at least 16 bytes per sample: a hash and a location.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from compress.measure.memory import read_peak_memory
from distill.cache import CacheReader, Dense, Identity, Samples, write_cache
from distill.cache.signals import SignalMask
from distill.losses.teacher_signals import TeacherSignals
from pipelines.runs.console import Advance, Console

IDENTITY = Identity("synthetic", "none", (Dense(2, dtype="float16"),))
OPEN = """
import sys, time
from pathlib import Path
from distill.cache import CacheReader
start = time.perf_counter()
reader = CacheReader(Path(sys.argv[1]))
print(time.perf_counter() - start)
"""


def main() -> None:
    """Writes a cache, opens it and reads from it, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10_000_000)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a sample")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console()
    drawn = np.random.default_rng(0).integers(0, 256, (options.samples, 16), np.uint8)
    keys = [row.tobytes() for row in drawn]
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory) / "cache"
        start = time.perf_counter()
        with console.track("writing", options.samples, "samples") as advance:
            write_samples(folder, keys, options.tokens, advance)
        rows = [("time to write", f"{time.perf_counter() - start:.0f} s, peak {read_peak_memory() / 1e9:.1f} GB")]
        rows += measure_opening(folder)
        rows += measure_lookups(folder, keys)
    console.table(f"{options.samples:,} samples", ("quantity", "measured"), rows)


def write_samples(folder: Path, keys: list[bytes], tokens: int, advance: Advance) -> None:
    """Writes a cache of samples with these keys and this number of tokens each."""

    def batch(rows: Sequence[int]) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor(rows)[:, None], "attention_mask": torch.ones(len(rows), 1)}

    def teacher(batch_inputs: Mapping[str, torch.Tensor]) -> TeacherSignals:
        return {"logits": make_logits(batch_inputs["input_ids"])}

    samples = Samples(keys, np.full(len(keys), tokens), batch)
    write_cache(folder, IDENTITY, samples, teacher, batch_tokens=1 << 18, on_progress=advance)


def make_logits(ids: torch.Tensor) -> torch.Tensor:
    """Returns two numbers per sample that float16 represents exactly, [rows, 2]."""
    return torch.cat([ids % 2048, ids // 2048 % 2048], 1).float()


def measure_opening(folder: Path) -> list[tuple[str, str]]:
    """Returns table rows with the number of shards, the time to open the cache and the size of the index."""
    times = []
    for _ in range(5):
        command = [sys.executable, "-c", OPEN, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603 - own code
        times.append(float(done.stdout))
    index = next(folder.glob("index-*")).stat().st_size
    reader = CacheReader(folder)
    return [
        ("shards", str(len(reader.store.shard_rows))),
        ("time to open", f"{np.median(times) * 1e3:.0f} ms, median of {len(times)} processes"),
        ("index", f"{index / len(reader):.1f} bytes per sample, memory-mapped ({index / 1e6:.0f} MB in all)"),
    ]


def measure_lookups(folder: Path, keys: list[bytes]) -> list[tuple[str, str]]:
    """Returns table rows with the times to find and to read a sample.

    Raises:
        AssertionError: A record differs from what was written.
    """
    reader, rng = CacheReader(folder), np.random.default_rng(1)
    batches = [rng.integers(0, len(keys), 32) for _ in range(2000)]
    times: dict[str, list[float]] = {"find": [], "read": []}
    for rows in batches:
        requested = [keys[i] for i in rows]
        start = time.perf_counter()
        reader.contains(requested)
        middle = time.perf_counter()
        mask = torch.ones(32, 1, dtype=torch.bool)
        logits = reader.read_signals(requested, SignalMask(mask, mask))["logits"]
        times["read"].append((time.perf_counter() - middle) / 32)
        times["find"].append((middle - start) / 32)
        if not torch.equal(logits, make_logits(torch.from_numpy(rows)[:, None])):
            raise AssertionError(f"the records of the samples {rows.tolist()} differ from what was written")
    return [
        ("time to find a sample", f"{np.median(times['find']) * 1e6:.2f} us per sample, batches of 32"),
        ("time to read a record", f"{np.median(times['read']) * 1e6:.1f} us per sample, including finding it"),
        ("verified", f"{32 * len(batches):,} random samples, all equal to what was written"),
    ]


if __name__ == "__main__":
    main()
