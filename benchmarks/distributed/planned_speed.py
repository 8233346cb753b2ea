"""Measured time of a student's step in every layout, and that of the layout which the planner chooses.

    python -m benchmarks.distributed.planned_speed --output runs/planned-speed  # six cases on 2 processes of this CPU
    python -m benchmarks.distributed.planned_speed --cases small-8 --output runs/planned-speed

A case is a size of BERT and the rows of a batch of all processes. The planner knows the model, and what this CPU
reached in products and sums. Printed are, per case, the layout that it chooses, its measured time over that of the
fastest layout, and the predicted and measured times of all layouts relative to the fastest. Each layout is timed in
processes of its own, all of them in turns. Times on a busy machine mean nothing.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.distributed.planned_memory import SIZES, predict, prepare_student
from benchmarks.distributed.sharded_memory import Peak, run_processes, save_model

import torch  # isort: skip

from distill.parallel.layout import Layout, parse_layout
from pipelines.planner.hardware import Hardware, estimate_step
from pipelines.planner.machines import measure_this_processor
from pipelines.runs.console import Console
from pipelines.settings.commands.plan import CPU, ClusterConfig
from pipelines.settings.this_machine import describe_machine

PROCESSES = 2
LAYOUTS = ("replicated", "zero1", "zero2", "fsdp=2", "tp=2", "pp=2")
CASES = ("small-8", "small-64", "medium-8", "medium-64", "base-8", "base-32")


def main() -> None:
    """Times all layouts of the cases and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.set_defaults(processes=PROCESSES)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    hardware = measure_this_processor(ClusterConfig(gpus=PROCESSES, gpu=CPU), 1)
    console = Console()
    console.say(
        f"{describe_machine()}, torch {torch.__version__}; each of {PROCESSES} processes reaches "
        f"{hardware.flops / 1e9:,.0f} GFLOP/s, {hardware.links / 1e9:.2f} GB/s and {1e6 * hardware.latency:,.0f} us"
    )
    rows = [describe_case(case, hardware, options) for case in options.cases]
    header = ("case", "chosen", "its time over the fastest", *(f"{name}: predicted, measured" for name in LAYOUTS))
    console.table("Time of a step", header, rows)


def describe_case(case: str, hardware: Hardware, options: argparse.Namespace) -> tuple[str, ...]:
    """Returns the table row of a case."""
    size, _, count = case.partition("-")
    options.rows = int(count)
    folder = options.output / f"model-{size}"
    if not folder.exists():
        save_model(folder, *SIZES[size])
    predicted, measured = {}, {}
    for name in LAYOUTS:
        trace = predict(folder, "student", parse_layout(name, PROCESSES), "none", options)
        predicted[name] = estimate_step(trace, hardware).total
    for _ in range(options.rounds):
        for name in LAYOUTS:
            measured.setdefault(name, []).append(time_layout(folder, name, options))
    times = {name: statistics.median(found) for name, found in measured.items()}
    chosen, fastest = min(predicted, key=predicted.__getitem__), min(times.values())
    least = min(predicted.values())
    cells = [f"{predicted[name] / least:.2f}, {times[name] / fastest:.2f}" for name in LAYOUTS]
    return (case, chosen, f"{times[chosen] / fastest:.2f}", *cells)


def time_layout(folder: Path, name: str, options: argparse.Namespace) -> float:
    """Returns the median seconds of a step on new processes."""
    file = options.output / "seconds.json"
    run_processes(partial(time_steps, options.rows, options.length, options.steps, file), PROCESSES, folder, name)
    return float(json.loads(file.read_text()))


def time_steps(rows: int, length: int, steps: int, file: Path, folder: Path, layout: Layout) -> Peak:
    """Writes the median seconds of a step, after two that aren't timed."""
    take_step: Callable[[], object] = prepare_student(rows, length, "none", folder, layout)
    spent = []
    for _ in range(2 + steps):
        torch.distributed.barrier()
        start = time.perf_counter()
        take_step()
        torch.distributed.barrier()
        spent.append(time.perf_counter() - start)
    if torch.distributed.get_rank() == 0:
        file.write_text(json.dumps(statistics.median(spent[2:])))
    return Peak()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
