"""The head and the loss of a language model with a large vocabulary: memory and time, dense, sparse and fused.

    python -m benchmarks.fused_loss
    python -m benchmarks.fused_loss --positions 1024 2048 4096 --device cuda

Ways, each from hidden states and the head's weight to the gradients of both: `dense` learns from the teacher's whole
distribution, `sparse` from K sampled ids a position on the head's logits, `fused` is the same without the logits; on a
GPU `liger` is Liger Kernel's cross-entropy with the head fused in, where it is installed: it learns labels, the nearest
there is. Times take turns in one process; memory is that of a process for each way, over what its inputs take.
The floor of the time is three products of positions x width x vocabulary at the rate of a large product.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compress.measure.training_precision import peak_flops
from distill.losses.fused import fused_sampled_cross_entropy
from distill.losses.logits import soft_cross_entropy
from distill.losses.sparse import sampled_cross_entropy

Way = Callable[[], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", nargs="+", type=int, default=[1024, 4096])
    parser.add_argument("--vocabulary", type=int, default=128_000)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--ids", type=int, default=64, help="sampled ids a position")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.memory_of:
        print(memory(given))
        return
    from pipelines.runs.console import Console
    from pipelines.settings.this_machine import commit, describe

    console = Console()
    for positions in given.positions:
        compare(argparse.Namespace(**vars(given) | {"positions": [positions]}), console)
    console.say(f"{describe()}, torch {torch.__version__}, commit {commit()}, {given.rounds} rounds")


def compare(given: argparse.Namespace, console: Any) -> None:
    setup = Setup(given)
    setup.check()
    times: dict[str, list[float]] = {name: [] for name in setup.ways}
    for number in range(given.rounds + 1):
        for name in setup.ways:
            seconds = setup.seconds(name)
            if number:
                times[name].append(seconds)
    del setup.ways
    rows = []
    rate = peak_flops(torch.device(given.device), torch.float32, 2048)
    floor = 6 * given.positions[0] * given.width * given.vocabulary / rate
    bytes_of = {name: alone(given, name) for name in times}
    for name, own in times.items():
        ratio = statistics.median(a / b for a, b in zip(own, times["sparse"], strict=True))
        rows.append((
            name, f"{statistics.median(own):.2f}", f"{ratio:.2f}", f"{floor:.2f}", f"{bytes_of[name] / 1e6:.0f}",
            f"1/{bytes_of['dense'] / bytes_of[name]:.1f}", f"1/{bytes_of['sparse'] / bytes_of[name]:.1f}",
        ))  # fmt: skip
    header = ("way", "seconds", "to sparse", "floor s", "memory MB", "to dense", "to sparse")
    title = f"{given.positions[0]} positions, {given.vocabulary} ids, width {given.width}, {given.ids} ids a target"
    console.table(f"{title}, {given.device}, {given.threads} threads, fp32", header, rows)


class Setup:
    """Inputs, and what each way does with them."""

    def __init__(self, given: argparse.Namespace):
        torch.manual_seed(0)
        (count,), size, device = given.positions, given.vocabulary, given.device
        self.hidden = torch.randn(count, given.width, device=device).requires_grad_()
        self.weight = (torch.randn(size, given.width, device=device) / given.width**0.5).requires_grad_()
        self.ids = torch.randint(0, size, (count, given.ids), device=device)
        self.weights = torch.full((count, given.ids), 1 / given.ids, device=device)
        self.device = device
        self.ways: dict[str, Way] = {"dense": self.dense, "sparse": self.sparse, "fused": self.fused}
        if device != "cpu":
            self.ways |= self.liger()

    def dense(self) -> Tensor:
        taught = self.hidden.detach().flip(0) @ self.weight.detach().T  # what a teacher of this size would answer
        return soft_cross_entropy(self.hidden @ self.weight.T, taught)

    def sparse(self) -> Tensor:
        return sampled_cross_entropy(self.hidden @ self.weight.T, self.ids, self.weights)

    def fused(self) -> Tensor:
        return fused_sampled_cross_entropy(self.hidden, self.weight, self.ids, self.weights)

    def liger(self) -> dict[str, Way]:
        try:
            from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
        except ImportError:
            return {}
        loss, labels = LigerFusedLinearCrossEntropyLoss(), self.ids[:, 0].contiguous()
        return {"liger": lambda: loss(self.weight, self.hidden, labels)}

    def gradients(self, name: str) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.ways[name](), (self.hidden, self.weight))

    def check(self) -> None:
        """Raises where fused gradients are others than those of the logits."""
        for ours, plain in zip(self.gradients("fused"), self.gradients("sparse"), strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-3, atol=1e-3 * float(plain.abs().max()))

    def seconds(self, name: str) -> float:
        start = time.perf_counter()
        self.gradients(name)
        if self.device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - start


def alone(given: argparse.Namespace, name: str) -> int:
    words = [f"--{key}={getattr(given, key)}" for key in ("vocabulary", "width", "ids", "threads", "device")]
    words += ["--positions", str(given.positions[0]), "--memory-of", name]
    command = [sys.executable, "-m", "benchmarks.fused_loss", *words]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def memory(given: argparse.Namespace) -> int:
    """Most bytes of one pass beyond the inputs; the gradients count."""
    setup = Setup(given)
    if given.device != "cpu":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        setup.gradients(given.memory_of)
        return torch.cuda.max_memory_allocated() - before
    from pipelines.runs.stage import peak_memory, reset_peak_memory

    reset_peak_memory()
    before = peak_memory()
    setup.gradients(given.memory_of)
    return max(1, peak_memory() - before)


if __name__ == "__main__":
    main()
