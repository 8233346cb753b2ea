"""Memory and time of a decoder's training step on a long document whose positions are divided among processes (cp).

    python -m benchmarks.distributed.segments          # 23M random weights, 2,048 and 8,192 tokens, 1 and 2 processes
    python -m benchmarks.distributed.segments --width 64 --layers 2 --vocabulary 500 --lengths 256 --rounds 1

The loss is that of the labels, in blocks of logits and on all logits at a time, as a loss on the teacher's distribution
needs them. Printed for each length and number of processes: the bytes that torch's allocator held at most above those
before the step (weights and gradients exist already), on the process that held most, and their share of one process's;
and the time of a step without the sum of the gradients, the slowest process's median, and its share of one process's.
Each process has one thread, so that times compare as many cores as processes; on a busy machine they mean nothing.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from benchmarks.common.machine import describe_setup
from benchmarks.memory.activations import LABELS_ONLY, build_decoder, draw_batch, keep_freed_memory, measure_peak
from compress.measure.memory import return_freed_memory
from distill.data.batches.segments import cut_segment
from distill.parallel.apply import apply_layout
from distill.parallel.layout import Layout
from distill.parallel.mesh import build_mesh, find_segment
from distill.train.activation_checkpointing import checkpoint_layers
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from pipelines.runs.console import Console

BLOCKS, ALL_LOGITS = "in blocks", "all at a time"


@dataclass(frozen=True)
class Case:
    """A step that is measured.

    Args:
        length: Tokens of the document.
        logits: How logits are computed: in blocks, or all at a time.
        width, layers, vocabulary: Sizes of the decoder.
        checkpointing: Mode of activation checkpointing.
        rounds: Number of steps that are timed.
    """

    length: int
    logits: str
    width: int
    layers: int
    vocabulary: int
    checkpointing: str
    rounds: int


@dataclass(frozen=True)
class Cost:
    """What a step takes on a process: bytes at most, and seconds."""

    peak: int
    seconds: float


def main() -> None:
    """Measures all cases and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--checkpointing", default="none")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    console = Console()
    console.say(f"{describe_setup()}, one thread a process")
    sizes = options.width, options.layers, options.vocabulary, options.checkpointing, options.rounds
    cases = [Case(length, logits, *sizes) for length, logits in product(options.lengths, (BLOCKS, ALL_LOGITS))]
    costs = {count: run_processes(cases, count) for count in options.processes}
    rows = [row for number, case in enumerate(cases) for row in compare_costs(case, number, costs)]
    header = ("tokens", "logits", "processes", "extra MB", "ratio to one", "seconds", "time, ratio to one")
    console.table(f"Decoder of {options.layers} x {options.width}, checkpointing {options.checkpointing}", header, rows)


def compare_costs(case: Case, number: int, costs: dict[int, list[list[Cost]]]) -> Iterator[tuple[str, ...]]:
    """Yields a table row of a case for each number of processes, from the costs of all cases on each of them."""
    first: Cost | None = None
    for processes, process_costs in costs.items():
        case_costs = [each[number] for each in process_costs]
        peak, seconds = max(cost.peak for cost in case_costs), max(cost.seconds for cost in case_costs)
        first = first or Cost(peak, seconds)
        yield (
            f"{case.length:,}", case.logits, str(processes), f"{peak / 1e6:.0f}", f"{peak / first.peak:.2f}",
            f"{seconds:.2f}", f"{seconds / first.seconds:.2f}",
        )  # fmt: skip


def run_processes(cases: list[Case], processes: int) -> list[list[Cost]]:
    """Returns for each of several processes what the steps of the cases take."""
    with TemporaryDirectory() as directory:
        store = Path(directory) / "store"
        torch.multiprocessing.start_processes(
            partial(run_process, cases, processes, store), nprocs=processes, start_method="spawn"
        )
        files = [Path(f"{store}.{rank}") for rank in range(processes)]
        return [[Cost(**each) for each in json.loads(file.read_text())] for file in files]


def run_process(cases: list[Case], processes: int, store: Path, rank: int) -> None:
    """Writes what the steps of the cases take on this process to the file `store.rank`."""
    torch.set_num_threads(1)
    return_freed_memory()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=processes)
    costs = [measure_step(case, Layout(cp=processes)) for case in cases]
    Path(f"{store}.{rank}").write_text(json.dumps([asdict(cost) for cost in costs]))
    dist.barrier()
    dist.destroy_process_group()


def measure_step(case: Case, layout: Layout) -> Cost:
    """Returns what a step takes on this process of a layout."""
    mesh = build_mesh(layout, "cpu")
    model = apply_layout(build_decoder(case.width, case.layers, case.vocabulary, dropout=0.0), layout, mesh)
    batch = cut_segment(draw_batch(case.vocabulary, 1, case.length), *find_segment(mesh))
    module = DistillationModule(model.train(), loss=LABELS_ONLY, train=TrainConfig())
    if case.logits == ALL_LOGITS:
        module.fused_term.name = ""

    def step() -> None:
        module.zero_grad(set_to_none=False)
        with checkpoint_layers(model, case.checkpointing):
            total, _ = module.compute_loss(batch)
            total.backward()

    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    step()
    peak, times = measure_peak(step), []
    keep_freed_memory()
    for _ in range(case.rounds):
        dist.barrier()
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return Cost(peak, statistics.median(times))


if __name__ == "__main__":
    main()
