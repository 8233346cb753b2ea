"""Measured time of a run with every pair of layouts, and with the pair that the planner chooses.

    python -m benchmarks.distributed.planned_speed --output runs/planned-speed  # six cases on 2 processes of this CPU
    python -m benchmarks.distributed.planned_speed --cases medium-small-8 --output runs/planned-speed

A case is a teacher and a student, BERTs of one of three sizes, and the rows of a batch of all processes. The teacher
answers every row once, as for a cache, and then the student trains on them for some epochs. The planner knows the
models, and what this CPU reached in products and sums. Printed are, per case, the chosen pair, its measured time over
that of the fastest pair, and the predicted and measured times of all layouts of teacher and student relative to the
fastest. Each layout is timed in processes of its own, all of them in turns; timings are kept in the output's
results.jsonl, and the same command resumes from them. Timings need an otherwise idle machine.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple, TypedDict

from benchmarks.common.machine import describe_setup
from benchmarks.distributed.planned_memory import PREPARE, predict, save_once
from benchmarks.distributed.sharded_memory import MemoryUse, run_processes

import torch  # isort: skip

from benchmarks.common.results_folder import Results, check_settings
from distill.parallel.layout import Layout, parse_layout
from pipelines.planner.hardware import Hardware, estimate_step
from pipelines.planner.machines import measure_this_processor
from pipelines.planner.report import describe_operator_rates
from pipelines.runs.console import Console
from pipelines.settings.commands.plan import CPU, ClusterConfig

PROCESSES = 2
STUDENTS = ("replicated", "zero1", "zero2", "fsdp=2", "tp=2", "pp=2")
TEACHERS = ("replicated", "fsdp=2", "tp=2", "pp=2")
QUERIED = 32  # rows that the teacher answers at a time
CASES = ("medium-small-8", "medium-small-32", "base-small-8", "base-small-32", "base-medium-8", "base-medium-32")


class Timing(TypedDict):
    """A line of results.jsonl: median seconds of a step of a student, or of a query of a teacher."""

    role: str
    size: str
    rows: int
    layout: str
    round: int
    seconds: float


class Model(NamedTuple):
    """A model that is timed: its role, its size, and the rows of a batch of all processes."""

    role: str
    size: str
    rows: int

    @property
    def layouts(self) -> tuple[str, ...]:
        """Layouts that a model of this role can have."""
        return STUDENTS if self.role == "student" else TEACHERS


def main() -> None:
    """Times all layouts of the models in the cases, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    check_settings(options.output, options, free=("cases", "epochs", "rounds"))
    for name in [name for name in os.environ if name.startswith("MALLOC_")]:  # for measurements of memory alone
        del os.environ[name]
    hardware, console = measure_this_processor(ClusterConfig(gpus=PROCESSES, gpu=CPU), 1), Console()
    console.say(
        f"{describe_setup()}; each of {PROCESSES} processes reaches {hardware.flops / 1e9:,.0f} GFLOP/s and "
        f"{hardware.links / 1e9:.2f} GB/s to the other; {'; '.join(map(': '.join, describe_operator_rates(hardware)))}"
    )
    cases = {case: parse_case(case) for case in options.cases}
    models = dict.fromkeys(model for pair in cases.values() for model in pair)
    predicted = {model: predict_times(model, hardware, options) for model in models}
    measured = {model: time_layouts(model, options) for model in models}
    rows = [(case, *describe_case(pair, predicted, measured, options.epochs)) for case, pair in cases.items()]
    header = ("case", "chosen: teacher, student", "fastest", "chosen / fastest", "pairs within 10 %")
    console.table(f"Time of a run of {options.epochs} epochs", header, rows)
    for role, names in (("teacher", TEACHERS), ("student", STUDENTS)):
        chosen = [model for model in models if model.role == role]
        table = [describe_model(model, predicted[model], measured[model]) for model in chosen]
        console.table(f"Time of a {role}'s batch: predicted, measured", (role, *names, "seconds"), table)


def parse_case(case: str) -> tuple[Model, Model]:
    """Returns the teacher and the student of a case."""
    teacher, student, rows = case.split("-")
    return Model("teacher", teacher, QUERIED), Model("student", student, int(rows))


def predict_times(model: Model, hardware: Hardware, options: argparse.Namespace) -> dict[str, float]:
    """Returns layout -> predicted seconds of a batch."""
    folder = save_once(model.size, options.output)
    times = {}
    for name in model.layouts:
        trace = predict(folder, model.role, parse_layout(name, PROCESSES), "none", model.rows, options.length)
        times[name] = estimate_step(trace, hardware).total
    return times


def time_layouts(model: Model, options: argparse.Namespace) -> dict[str, float]:
    """Returns layout -> median over the rounds of the measured seconds of a batch."""
    results, folder = Results[Timing](options.output), save_once(model.size, options.output)
    measured: dict[str, list[float]] = {name: [] for name in model.layouts}
    for turn, name in product(range(options.rounds), model.layouts):
        known = results.find(**model._asdict(), layout=name, round=turn)
        if known is None:
            seconds = time_layout(model, folder, name, options)
            role, size, rows = model
            known = results.add(Timing(role=role, size=size, rows=rows, layout=name, round=turn, seconds=seconds))
        measured[name].append(known["seconds"])
    return {name: statistics.median(times) for name, times in measured.items()}


def time_layout(model: Model, folder: Path, name: str, options: argparse.Namespace) -> float:
    """Returns the median seconds of a batch on new processes."""
    file = options.output / "seconds.json"
    work = partial(time_batches, model.role, model.rows, options.length, options.steps, file)
    run_processes(work, PROCESSES, folder, name)
    return float(json.loads(file.read_text()))


def time_batches(role: str, rows: int, length: int, steps: int, file: Path, folder: Path, layout: Layout) -> MemoryUse:
    """Writes the median seconds of a batch, after one that isn't timed."""
    run_batch = PREPARE[role](rows, length, "none", folder, layout)
    spent = []
    for _ in range(1 + steps):
        torch.distributed.barrier()
        start = time.perf_counter()
        run_batch()
        torch.distributed.barrier()
        spent.append(time.perf_counter() - start)
    if torch.distributed.get_rank() == 0:
        file.write_text(json.dumps(statistics.median(spent[1:])))
    return MemoryUse()


def describe_case(
    pair: tuple[Model, Model],
    predicted: Mapping[Model, Mapping[str, float]],
    measured: Mapping[Model, Mapping[str, float]],
    epochs: int,
) -> tuple[str, ...]:
    """Returns the cells of a case: the chosen pair, the fastest one, and how the chosen one compares with it."""
    teacher, student = pair

    def add_up(times: Mapping[Model, Mapping[str, float]]) -> dict[tuple[str, str], float]:
        pairs = product(teacher.layouts, student.layouts)
        query, step = times[teacher], times[student]
        return {
            (teacher_layout, student_layout): query[teacher_layout] / QUERIED
            + epochs * step[student_layout] / student.rows
            for teacher_layout, student_layout in pairs
        }

    expected, actual = add_up(predicted), add_up(measured)
    chosen, fastest = min(expected, key=expected.__getitem__), min(actual, key=actual.__getitem__)
    near = sum(seconds <= 1.1 * actual[fastest] for seconds in actual.values())
    return ", ".join(chosen), ", ".join(fastest), f"{actual[chosen] / actual[fastest]:.2f}", f"{near} of {len(actual)}"


def describe_model(model: Model, predicted: Mapping[str, float], measured: Mapping[str, float]) -> tuple[str, ...]:
    """Returns the cells of a model: its times in all layouts over those of the fastest, and the fastest's seconds."""
    least, fastest = min(predicted.values()), min(measured.values())
    cells = [f"{predicted[name] / least:.2f}, {measured[name] / fastest:.2f}" for name in model.layouts]
    return (f"{model.size}, {model.rows} rows", *cells, f"{least:.2f}, {fastest:.2f}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
