"""A training step alone and beside a process that keeps one core busy, by how long waiting threads spin.

    python -m benchmarks.busy_machine                      # an encoder layer of 384, batch 32 x 24, 2 threads
    python -m benchmarks.busy_machine --spins default 0 1000 --steps 20

GNU OpenMP's threads wait for each other by spinning, by default for milliseconds; beside a busy process a spinning
thread takes the core that the thread it waits for needs. `GOMP_SPINCOUNT` limits the spinning. Each process trains in
turns with the others, alone and in company; printed are medians and their ratio to the default alone.
"""

import argparse
import ctypes
import os
import signal
import statistics
import subprocess
import sys
import time

from pipelines.runs.console import Console
from pipelines.settings.this_machine import describe_machine

DEFAULT = "default"
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def main() -> None:
    """Measures all spin counts and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spins", nargs="+", default=[DEFAULT, "0", "100", "1000", "10000"])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(statistics.median(time_steps(options.steps, options.threads)))
        return
    console = Console()
    console.say(f"{describe_machine()}, {options.threads} threads")
    found: dict[tuple[str, bool], list[float]] = {}
    for _ in range(options.rounds):
        for spins in options.spins:
            for is_busy in (False, True):
                found.setdefault((spins, is_busy), []).append(run_worker(spins, is_busy, options))
    medians = {key: statistics.median(values) for key, values in found.items()}
    reference = medians[options.spins[0], False]
    console.table(
        "Training step",
        ("GOMP_SPINCOUNT", "alone", "beside a busy process", "of the first alone", "of its own alone"),
        [
            (
                spins,
                f"{1e3 * medians[spins, False]:.1f} ms ({medians[spins, False] / reference:.2f})",
                f"{1e3 * medians[spins, True]:.1f} ms",
                f"{medians[spins, True] / reference:.2f}",
                f"{medians[spins, True] / medians[spins, False]:.2f}",
            )
            for spins in options.spins
        ],
    )


def run_worker(spins: str, is_busy: bool, options: argparse.Namespace) -> float:
    """Returns the median seconds of a step in a process of its own, alone or beside a busy process."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_NUM_THREADS")
    }
    environment |= {} if spins == DEFAULT else {"GOMP_SPINCOUNT": spins}
    busy = start_busy_process() if is_busy else None
    try:
        command = [sys.executable, "-m", "benchmarks.busy_machine", "--worker", "--steps", str(options.steps)]
        command += ["--threads", str(options.threads)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)  # noqa: S603 - own command
    finally:
        if busy is not None:
            busy.kill()
            busy.wait()
    return float(done.stdout.split()[-1])


def start_busy_process() -> "subprocess.Popen[bytes]":
    """Starts a process that keeps a core busy until it is killed or this process ends."""
    return subprocess.Popen([sys.executable, "-c", "while True: pass"], preexec_fn=end_with_parent)


def end_with_parent() -> None:
    """Makes the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)


def time_steps(steps: int, threads: int) -> list[float]:
    """Returns the seconds of forward and backward passes of an encoder layer."""
    import torch
    from torch import nn

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(384, 12, 1536, batch_first=True, dropout=0.0)
    inputs = torch.randn(32, 24, 384)
    times = []
    for number in range(steps + 5):
        start = time.perf_counter()
        layer(inputs).square().mean().backward()
        if number >= 5:
            times.append(time.perf_counter() - start)
    return times


if __name__ == "__main__":
    main()
