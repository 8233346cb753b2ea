"""Predicted time of sending at a `--bandwidth` against how much longer a step takes, on two machines with a slow cable.

    python -m benchmarks.distributed.planned_bandwidth --output runs/bandwidth  # BERT of 256 x 4, three rates (root)
    python -m benchmarks.distributed.planned_bandwidth --layouts replicated --rates 50Mbit/s --output runs/bandwidth

The machines are network namespaces of this one, and a token bucket limits what each sends. One process on each trains
a student and sends to the other by gloo, at each rate and without a limit in turns. Printed per layout and rate are the
bytes that a process sends in a step, as predicted and as its network interface counted them; and the seconds that a
step takes longer than without a limit, as predicted and as the median of the rounds' differences. Broadcasts of ZeRO 1
count as often as they make others wait, so its predicted bytes are more than each process sends.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from benchmarks.common.machine import describe_setup
from benchmarks.distributed.planned_memory import SIZES, predict, prepare_student, save_once
from benchmarks.distributed.two_machines import ADDRESSES, LINKS, limit_link, read_sent_bytes, two_machines
from distill.parallel.layout import parse_layout
from pipelines.planner.hardware import Hardware, count_sent, estimate_step
from pipelines.planner.trace import StepTrace
from pipelines.runs.console import Console
from pipelines.settings.commands.plan import parse_rate

PORT = 29511
PROCESSES = 2
# Only differences between bandwidths are printed: what the devices reach cancels out.
MACHINES = Hardware(PROCESSES, 1, 0, flops=1e12, links=math.inf, bandwidth=math.inf, can_overlap=False)


@dataclass(frozen=True)
class Sending:
    """Sending of a step at a rate.

    Args:
        layout: Layout of the student.
        rate: As `--bandwidth` takes it, such as 100Mbit/s.
        predicted_bytes: Of a process, in a step.
        sent_bytes: Likewise, counted by the network interface of the first machine, without a limit.
        predicted_seconds: By which a step takes longer than without a limit.
        seconds: Likewise, measured.
        step: Seconds of a step without a limit.
    """

    layout: str
    rate: str
    predicted_bytes: float
    sent_bytes: float
    predicted_seconds: float
    seconds: float
    step: float


def main() -> None:
    """Measures all layouts at all rates and prints the table."""
    options = parse_options()
    if options.rank >= 0:
        time_rates(options)
        return
    console = Console()
    console.say(f"{describe_setup()}, gloo, {PROCESSES} network namespaces")
    rows = [format_row(each) for name in options.layouts for each in measure_layout(name, options)]
    header = (
        "layout", "rate", "predicted MB", "sent MB", "ratio", "predicted s", "measured s", "ratio", "unlimited step s"
    )  # fmt: skip
    console.table("Sending of a step", header, rows)


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the options; with `--rank`, this is the process of a machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--layouts", nargs="+", default=["replicated", "zero1", "fsdp=2", "tp=2"])
    parser.add_argument("--rates", nargs="+", default=["100Mbit/s", "300Mbit/s", "1Gbit/s"])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def measure_layout(name: str, options: argparse.Namespace) -> list[Sending]:
    """Returns the predicted and the measured sending of a layout at each rate."""
    folder = save_once(options.size, options.output)
    trace = predict(folder, "student", parse_layout(name, PROCESSES), "none", options.rows, options.length)
    sent = sum(count_sent(each, size, MACHINES.backend) for each, size in trace.sent.items() if len(each.ranks) > 1)
    run_machines(name, options)
    measured = json.loads(find_file(options.output, name).read_text())
    times: dict[str, list[float]] = measured["seconds"]
    counted: dict[str, list[int]] = measured["bytes"]
    return [
        Sending(
            name, rate, sent, statistics.median(counted[""]), predict_delay(trace, rate),
            statistics.median(slow - fast for slow, fast in zip(times[rate], times[""], strict=True)),
            statistics.median(times[""]),
        )
        for rate in options.rates
    ]  # fmt: skip


def predict_delay(trace: StepTrace, rate: str) -> float:
    """Returns by how many seconds a step takes longer at a rate than without a limit."""
    limited = replace(MACHINES, bandwidth=parse_rate(rate, "rates"))
    return estimate_step(trace, limited).total - estimate_step(trace, MACHINES).total


def run_machines(name: str, options: argparse.Namespace) -> None:
    """Runs the process of each machine, the first of which writes the times of a layout to a file.

    Raises:
        RuntimeError: One of them failed.
    """
    arguments = [
        *(
            sys.executable,
            "-m",
            "benchmarks.distributed.planned_bandwidth",
            "--output",
            str(options.output),
            "--layouts",
            name,
        ),
        *("--size", options.size, "--rates", *options.rates, "--rounds", str(options.rounds)),
        *("--rows", str(options.rows), "--length", str(options.length)),
    ]
    with two_machines() as machines:
        for rank, link in enumerate(LINKS):
            machines.start(
                rank, [*arguments, "--rank", str(rank)], {"GLOO_SOCKET_IFNAME": link, "OMP_NUM_THREADS": "1"}
            )
        printed = [process.communicate()[0] for process in machines.processes]
        if any(process.returncode for process in machines.processes):
            raise RuntimeError("\n".join(printed))


def time_rates(options: argparse.Namespace) -> None:
    """Writes, as the process of one machine, the seconds and the sent bytes of a step at each rate in each round."""
    (name,), link = options.layouts, LINKS[options.rank]
    dist.init_process_group("gloo", init_method=f"tcp://{ADDRESSES[0]}:{PORT}", rank=options.rank, world_size=PROCESSES)
    folder = options.output / f"model-{options.size}"
    take_step = prepare_student(options.rows, options.length, "none", folder, parse_layout(name, PROCESSES))
    rates = ["", *options.rates]
    for _ in range(2):  # DistributedDataParallel sorts its buckets after the first step
        take_step()
    seconds: dict[str, list[float]] = {rate: [] for rate in rates}
    sent: dict[str, list[int]] = {rate: [] for rate in rates}
    for _ in range(options.rounds):
        for rate in rates:
            limit_link(link, parse_rate(rate, "rates") if rate else 0)
            dist.barrier()
            start, before = time.perf_counter(), read_sent_bytes(link)
            take_step()
            dist.barrier()
            seconds[rate].append(time.perf_counter() - start)
            sent[rate].append(read_sent_bytes(link) - before)
    if options.rank == 0:
        find_file(options.output, name).write_text(json.dumps({"seconds": seconds, "bytes": sent}))
    dist.destroy_process_group()


def find_file(output: Path, name: str) -> Path:
    """Returns the file with the times of a layout."""
    return output / f"{name.replace('=', '')}.json"


def format_row(sending: Sending) -> tuple[str, ...]:
    """Returns the table row of a layout at a rate."""
    return (
        sending.layout, sending.rate, f"{sending.predicted_bytes / 1e6:.1f}", f"{sending.sent_bytes / 1e6:.1f}",
        f"{sending.predicted_bytes / sending.sent_bytes:.2f}", f"{sending.predicted_seconds:.3f}",
        f"{sending.seconds:.3f}", f"{sending.predicted_seconds / sending.seconds:.2f}", f"{sending.step:.3f}",
    )  # fmt: skip


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
