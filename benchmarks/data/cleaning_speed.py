"""How long cleaning takes for many short rows, and how much memory.

    python -m benchmarks.data.cleaning_speed --data examples/data/banking77 --rows 1000000

Rows are made of the words of a data set's rows, with typing errors in some and a near copy of every twentieth. Each
list of steps is applied in a process of its own, as the clean stage applies it; printed are its time, the peak memory
of that process beyond the rows themselves plus that of its largest worker, and how many rows it changed or dropped.
"""

import argparse
import multiprocessing
import random
import resource
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pyarrow as pa

from benchmarks.common.tables import read_table
from distill.data.augment.noise import mistype
from distill.data.clean.config import CleanConfig
from distill.data.clean.rows import CleanedRow, Cleaning
from distill.data.clean.spelling import read_english_words
from distill.data.sources.text_column import TextColumn
from distill.data.splits.examples import Examples, Splits
from distill.data.stored.encoding import count_processors
from pipelines.runs.console import Console
from pipelines.settings.this_machine import find_processor

STEPS = ("standard,language=off", "near-duplicates", "spelling", "language")
_COPIED_EVERY, _MISTYPED_EVERY = 20, 5


class Cost(NamedTuple):
    """What cleaning took: seconds, bytes beyond the rows and of the largest worker, and rows changed or dropped."""

    seconds: float
    extra: int
    rows: int


def main() -> None:
    """Cleans with each list of steps, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--steps", nargs="+", default=list(STEPS))
    options = parser.parse_args()
    texts = [row["text"] for row in read_table(options.data, "train")]
    table = []
    for steps in options.steps:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            cost = pool.submit(clean_rows_once, texts, options.rows, steps).result()
        table.append((steps, f"{cost.seconds:.0f}", f"{cost.extra / 2**20:,.0f}", f"{cost.rows:,}"))
        print(table[-1], flush=True)
    header = ("steps", "seconds", "MiB beyond the rows, with the largest worker", "changed or dropped")
    Console().table(f"Cleaning {options.rows:,} rows, {find_processor()}", header, table)


def make_texts(texts: list[str], count: int, seed: int) -> Iterator[str]:
    """Yields rows of 6 to 14 words drawn from those of `texts`, some with a typing error, and near copies of some."""
    rng = random.Random(seed)  # noqa: S311
    words = [word for text in texts for word in text.split()]
    last = ""
    for number in range(count):
        if number % _COPIED_EVERY == _COPIED_EVERY - 1:
            yield f"{last} please"
            continue
        row = rng.choices(words, k=rng.randint(6, 14))
        if number % _MISTYPED_EVERY == 0:
            position = rng.randrange(len(row))
            row[position] = mistype(row[position], rng) or row[position]
        last = " ".join(row)
        yield last


def clean_rows_once(texts: list[str], count: int, steps: str) -> Cost:
    """Returns what cleaning made rows takes, in a process that does nothing else."""
    column = TextColumn(pa.chunked_array([pa.array(list(make_texts(texts, count, 0)), pa.string())]))
    nothing = Examples([])
    splits = Splits((), Examples(column), nothing, nothing, nothing, {})
    touched: set[int] = set()

    def record(row: CleanedRow) -> None:
        touched.add(row.row)

    listed = frozenset(read_english_words()) if "spelling" in steps else frozenset[str]()
    before = _peak_bytes()
    start = time.perf_counter()
    with TemporaryDirectory() as folder:
        Cleaning(CleanConfig(steps=steps), listed, record, Path(folder), count_processors()).clean(splits)
    return Cost(time.perf_counter() - start, _peak_bytes() - before, len(touched))


def _peak_bytes() -> int:
    """Returns the peak of this process plus that of its largest ended child, the only one that the system reports."""
    parent, children = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return 1024 * (parent + children)


if __name__ == "__main__":
    main()
