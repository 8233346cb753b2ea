"""A cache of ten million samples: how long it takes to open, what its index takes, how long a look-up takes.

    python -m benchmarks.cache_index --samples 10000000

Samples are synthetic: two numbers each, written by the same writer as any cache. Opening is timed in a fresh process,
once with the files in the page cache. The index's memory is what it would take if every page of it were resident.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from compress.measure.memory import peak_memory
from distill.cache import CacheReader, Dense, Identity, Samples, write_cache
from distill.cache.signals import SignalMask
from pipelines.runs.console import Console

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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10_000_000)
    parser.add_argument("--tokens", type=int, default=64, help="of a sample")
    given = parser.parse_args()
    torch.set_num_threads(1)
    console = Console()
    drawn = np.random.default_rng(0).integers(0, 256, (given.samples, 16), np.uint8)
    keys = [row.tobytes() for row in drawn]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "cache"
        start = time.perf_counter()
        with console.track("writing", given.samples, "samples") as advance:
            write(folder, keys, given.tokens, advance)
        rows = [("written in", f"{time.perf_counter() - start:.0f} s, peak {peak_memory() / 1e9:.1f} GB")]
        rows += opened(folder)
        rows += looked_up(folder, keys)
    console.table(f"{given.samples:,} samples", ("what", "found"), rows)


def write(folder: Path, keys: list[bytes], tokens: int, advance: object) -> None:
    def batch(rows: Sequence[int]) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor(rows)[:, None], "attention_mask": torch.ones(len(rows), 1)}

    def teacher(asked: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"logits": answer(asked["input_ids"])}

    samples = Samples(keys, np.full(len(keys), tokens), batch)
    write_cache(folder, IDENTITY, samples, teacher, batch_tokens=1 << 18, on_progress=advance)  # type: ignore[arg-type]


def answer(ids: torch.Tensor) -> torch.Tensor:
    """Two numbers that float16 holds exactly."""
    return torch.cat([ids % 2048, ids // 2048 % 2048], 1).float()


def opened(folder: Path) -> list[tuple[str, str]]:
    times = []
    for _ in range(5):
        done = subprocess.run([sys.executable, "-c", OPEN, str(folder)], capture_output=True, text=True, check=True)
        times.append(float(done.stdout))
    index = next(folder.glob("index-*")).stat().st_size
    reader = CacheReader(folder)
    return [
        ("shards", str(len(reader.store.shard_rows))),
        ("opened in", f"{np.median(times) * 1e3:.0f} ms, median of {len(times)} processes"),
        ("index", f"{index / len(reader):.1f} bytes a sample, mapped ({index / 1e6:.0f} MB if all of it is touched)"),
    ]


def looked_up(folder: Path, keys: list[bytes]) -> list[tuple[str, str]]:
    reader, rng = CacheReader(folder), np.random.default_rng(1)
    batches = [rng.integers(0, len(keys), 32) for _ in range(2000)]
    timed: dict[str, list[float]] = {"place": [], "record": []}
    for rows in batches:
        wanted = [keys[i] for i in rows]
        start = time.perf_counter()
        reader.holds(wanted)
        middle = time.perf_counter()
        mask = torch.ones(32, 1, dtype=torch.bool)
        found = reader.signals_of(wanted, SignalMask(mask, mask))["logits"]
        timed["record"].append((time.perf_counter() - middle) / 32)
        timed["place"].append((middle - start) / 32)
        assert torch.equal(found, answer(torch.from_numpy(rows)[:, None]))
    return [
        ("finding a place", f"{np.median(timed['place']) * 1e6:.2f} us a sample, batches of 32"),
        ("reading a record", f"{np.median(timed['record']) * 1e6:.1f} us a sample, found, checked and decoded"),
        ("checked", f"{32 * len(batches):,} random samples, every one what was written"),
    ]


if __name__ == "__main__":
    main()
