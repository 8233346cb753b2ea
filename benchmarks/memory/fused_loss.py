"""Memory and time of the output head and the loss of a language model with a large vocabulary.

    python -m benchmarks.memory.fused_loss
    python -m benchmarks.memory.fused_loss --positions 1024 2048 4096 --device cuda

Compared, on random hidden states, each from these and the head's weight to the gradients of both:

    dense   soft cross-entropy with the teacher's whole distribution, which the teacher's head computes in the same call
    sparse  cross-entropy with K sampled ids per position, on the head's logits
    fused   the same without materializing the logits
    liger   on a GPU with Liger Kernel installed: its fused cross-entropy with labels, its nearest equivalent

Printed per number of positions: the median milliseconds, the median ratio to `sparse` within a round, and the peak
memory in MB of a process that computes nothing else, beyond its inputs. The lower bound of the time is that of the
products of positions x width x vocabulary at the rate that one large product reaches on this machine: three, and four
with the teacher's head.
"""

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from benchmarks.common.machine import describe_setup
from benchmarks.common.timing import median_ratio, synchronize
from compress.measure.memory import read_peak_memory, reset_peak_memory
from compress.measure.precision_speed import measure_peak_flops
from compress.measure.turns import time_in_turns
from distill.losses.fused import fused_sampled_cross_entropy
from distill.losses.logits import soft_cross_entropy
from distill.losses.sparse import sampled_cross_entropy
from pipelines.runs.console import Console

Loss: TypeAlias = Callable[[], Tensor]
MEGABYTE = 1e6
DENSE = "dense, with the teacher's head"
PRODUCTS = {DENSE: 4}  # of positions x width x vocabulary; 3 of the other losses and their gradients


def main() -> None:
    """Compares all losses at each number of positions and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", nargs="+", type=int, default=[1024, 4096])
    parser.add_argument("--vocabulary", type=int, default=128_000)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--ids", type=int, default=64, help="sampled ids per position")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.memory_of:
        print(measure_memory(options))
        return
    console = Console()
    for positions in options.positions:
        compare(argparse.Namespace(**vars(options) | {"positions": [positions]}), console)
    console.say(f"{describe_setup()}, {options.rounds} rounds")


def compare(options: argparse.Namespace, console: Console) -> None:
    """Prints the table of one number of positions."""
    times = time_losses(options)
    (positions,) = options.positions
    rate = measure_peak_flops(torch.device(options.device), torch.float32, 2048 if options.device == "cpu" else 8192)
    product = 2 * positions * options.width * options.vocabulary / rate
    memory = {name: measure_alone(options, name) for name in times}
    rows = [
        (
            name,
            f"{1e3 * statistics.median(seconds):.1f}",
            f"{median_ratio(seconds, times['sparse']):.2f}",
            f"{1e3 * PRODUCTS.get(name, 3) * product:.1f}",
            f"{memory[name] / MEGABYTE:.0f}",
            f"1/{memory[DENSE] / memory[name]:.1f}",
            f"1/{memory['sparse'] / memory[name]:.1f}",
        )
        for name, seconds in times.items()
    ]
    header = ("loss", "ms", "time / sparse", "lower bound ms", "memory MB", "memory / dense", "memory / sparse")
    sizes = f"{positions} positions, {options.vocabulary} tokens, width {options.width}, {options.ids} sampled ids"
    console.table(f"{sizes}, {options.device}, {options.threads} threads, fp32", header, rows)


def time_losses(options: argparse.Namespace) -> dict[str, list[float]]:
    """Returns the seconds of each loss and its gradients in each round."""
    problem = Problem(options)
    problem.check_fused()
    steps = {name: partial(problem.compute_gradients, loss) for name, loss in problem.losses.items()}
    wait = partial(synchronize, torch.device(options.device))
    return time_in_turns(steps, options.rounds, warmup=1, before=wait, after=wait)


class Problem:
    """Inputs of the losses."""

    def __init__(self, options: argparse.Namespace):
        torch.manual_seed(0)
        (count,), size, device = options.positions, options.vocabulary, options.device
        self.hidden = torch.randn(count, options.width, device=device).requires_grad_()
        self.weight = (torch.randn(size, options.width, device=device) / options.width**0.5).requires_grad_()
        self.ids = torch.randint(0, size, (count, options.ids), device=device)
        self.weights = torch.full((count, options.ids), 1 / options.ids, device=device)
        self.losses: dict[str, Loss] = {DENSE: self.dense, "sparse": self.sparse, "fused": self.fused}
        if device != "cpu":
            self.losses |= self.liger()

    def dense(self) -> Tensor:
        """Returns the loss for logits of a teacher of this size, whose head computes them here."""
        teacher_logits = self.hidden.detach().flip(0) @ self.weight.detach().T
        return soft_cross_entropy(self.hidden @ self.weight.T, teacher_logits)

    def sparse(self) -> Tensor:
        """Returns the loss for sampled ids, computed from logits."""
        return sampled_cross_entropy(self.hidden @ self.weight.T, self.ids, self.weights)

    def fused(self) -> Tensor:
        """Returns the loss for sampled ids, computed without logits."""
        return fused_sampled_cross_entropy(self.hidden, self.weight, self.ids, self.weights)

    def liger(self) -> dict[str, Loss]:
        """Returns Liger Kernel's loss under its name; nothing if it isn't installed."""
        try:
            from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
        except ImportError:
            return {}
        loss, labels = LigerFusedLinearCrossEntropyLoss(), self.ids[:, 0].contiguous()
        return {"liger": lambda: loss(self.weight, self.hidden, labels)}

    def compute_gradients(self, loss: Loss) -> tuple[Tensor, ...]:
        """Returns the gradients of the hidden states and of the head's weight."""
        return torch.autograd.grad(loss(), (self.hidden, self.weight))

    def check_fused(self) -> None:
        """Checks that the fused gradients equal those of the logits.

        Raises:
            AssertionError: They differ.
        """
        pairs = zip(self.compute_gradients(self.fused), self.compute_gradients(self.sparse), strict=True)
        for fused, reference in pairs:
            torch.testing.assert_close(fused, reference, rtol=1e-3, atol=1e-3 * float(reference.abs().max()))


def measure_alone(options: argparse.Namespace, name: str) -> int:
    """Returns the peak bytes of a process that computes only this loss."""
    arguments = [f"--{key}={getattr(options, key)}" for key in ("vocabulary", "width", "ids", "threads", "device")]
    arguments += ["--positions", str(options.positions[0]), "--memory-of", name]
    command = [sys.executable, "-m", "benchmarks.memory.fused_loss", *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603 - own command
    return int(done.stdout.split()[-1])


def measure_memory(options: argparse.Namespace) -> int:
    """Returns the peak bytes of one pass beyond its inputs, including the gradients."""
    problem = Problem(options)
    loss = problem.losses[options.memory_of]
    if options.device != "cpu":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        problem.compute_gradients(loss)
        return torch.cuda.max_memory_allocated() - before
    reset_peak_memory()
    before = read_peak_memory()
    problem.compute_gradients(loss)
    return max(1, read_peak_memory() - before)


if __name__ == "__main__":
    main()
