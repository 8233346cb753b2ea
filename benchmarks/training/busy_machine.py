"""A training alone and beside a process that keeps one core busy, by how long waiting threads spin.

    python -m benchmarks.training.busy_machine  # MiniLM, 1,500 rows of Banking77, two epochs, 2 threads
    python -m benchmarks.training.busy_machine --spins default 0 2000 --rounds 3

GNU OpenMP's threads wait for each other by spinning, by default for milliseconds; beside a busy process a spinning
thread takes the core that the thread it waits for needs. `GOMP_SPINCOUNT` limits the spinning. The teacher stage of the
demo runs with each count in turns, alone and in company; printed are the medians of its seconds and their ratio to the
default alone. Kernels share a core fairly, so a step whose work is divided in halves takes twice as long beside a busy
process on two cores: 2.0 is what not spinning at all would give at no other cost.
"""

import argparse
import ctypes
import json
import os
import signal
import statistics
import subprocess
import sys
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.common.machine import describe_setup
from pipelines.runs.console import Console

DEFAULT = "default"
ROOT = Path(__file__).parents[2]
DATA = ROOT / "examples" / "data" / "banking77"
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def main() -> None:
    """Measures all spin counts and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spins", nargs="+", default=[DEFAULT, "0", "2000"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, default=1500)
    options = parser.parse_args()
    console = Console()
    console.say(f"{describe_setup()}, {options.threads} threads")
    times: dict[tuple[str, bool], list[float]] = {}
    with TemporaryDirectory() as directory:
        write_data(Path(directory) / "data", options.rows)
        for number in range(options.rounds):
            for spins in options.spins:
                for is_busy in (False, True):
                    output = Path(directory) / f"{spins}-{is_busy}-{number}"
                    seconds = time_training(output, Path(directory) / "data", spins, options.threads, is_busy=is_busy)
                    times.setdefault((spins, is_busy), []).append(seconds)
    medians = {key: statistics.median(values) for key, values in times.items()}
    reference = medians[options.spins[0], False]
    console.table(
        "Fine-tuning of the teacher",
        ("GOMP_SPINCOUNT", "alone", "beside a busy process", "of the first alone", "of its own alone"),
        [
            (
                spins,
                f"{medians[spins, False]:.1f} s ({medians[spins, False] / reference:.2f})",
                f"{medians[spins, True]:.1f} s",
                f"{medians[spins, True] / reference:.2f}",
                f"{medians[spins, True] / medians[spins, False]:.2f}",
            )
            for spins in options.spins
        ],
    )


def write_data(folder: Path, rows: int) -> None:
    """Writes the first rows of Banking77's splits."""
    folder.mkdir()
    for split, count in (("train", rows), ("test", 300)):
        with (DATA / f"{split}.csv").open() as lines:
            (folder / f"{split}.csv").write_text("".join(islice(lines, count + 1)))


def time_training(output: Path, data: Path, spins: str, threads: int, *, is_busy: bool) -> float:
    """Returns the seconds of the teacher stage of a command, alone or beside a busy process."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_NUM_THREADS")
    }
    # A count that is set stays; this one is GNU OpenMP's own, which the commands would lower.
    environment |= {"GOMP_SPINCOUNT": "300000" if spins == DEFAULT else spins}
    arguments = ["--config", "configs/demo.yaml", "--data", str(data), "--data.unknown_labels", "drop"]
    arguments += ["--wandb", "off", "--until", "teacher", "--threads", str(threads), "--output", str(output)]
    busy = start_busy_process() if is_busy else None
    try:
        command = [sys.executable, "-m", "pipelines.distill", *arguments]
        subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, check=True)  # noqa: S603 - own command
    finally:
        if busy is not None:
            busy.kill()
            busy.wait()
    (manifest,) = output.glob("teacher/*/manifest.json")
    return float(json.loads(manifest.read_text())["wall_seconds"])


def start_busy_process() -> "subprocess.Popen[bytes]":
    """Starts a process that keeps a core busy until it is killed or this process ends."""
    return subprocess.Popen([sys.executable, "-c", "while True: pass"], preexec_fn=end_with_parent)


def end_with_parent() -> None:
    """Makes the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)


if __name__ == "__main__":
    main()
