"""Which precision trains fastest on this machine: measured, not assumed."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

WORTH = 1.1  # a precision that rounds more has to be this many times faster: nearer ones change places by chance
HOPELESS = 3.0  # a first step this many times slower than the best so far ends the trial


def candidates(device: torch.device) -> tuple[str, ...]:
    """Lightning's names of the precisions worth trying on a device; fp16 on a CPU never is."""
    if device.type == "cuda":
        return ("32", "bf16-mixed") if torch.cuda.is_bf16_supported() else ("32", "16-mixed")
    return ("32", "bf16-mixed")


def autocast(precision: str, device: torch.device) -> AbstractContextManager:
    """The context in which Lightning would run a step of that precision."""
    types = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
    return torch.autocast(device.type, types[precision]) if precision in types else nullcontext()


def measure_precisions(
    model: nn.Module, loss: Callable[[nn.Module], Tensor], precisions: Sequence[str], steps: int = 3
) -> dict[str, float]:
    """Median seconds of forward and backward of `loss(model)` in each precision; weights and gradients stay the same.

    A precision whose first step is hopelessly slow is not measured further and reported with that step.
    """
    device = next(model.parameters()).device
    seconds: dict[str, float] = {}
    for precision in precisions:
        if device.type == "cuda":
            timed_step(model, loss, precision, device)  # loads the kernels
        first = timed_step(model, loss, precision, device)
        if seconds and first > HOPELESS * min(seconds.values()):
            seconds[precision] = first
            continue
        times = sorted(timed_step(model, loss, precision, device) for _ in range(steps))
        seconds[precision] = times[len(times) // 2]
    return seconds


def fastest(seconds: Mapping[str, float]) -> str:
    """The fastest precision; `32` unless another is clearly faster."""
    best = min(seconds, key=lambda name: seconds[name])
    return "32" if seconds.get("32", float("inf")) < WORTH * seconds[best] else best


def timed_step(model: nn.Module, loss: Callable[[nn.Module], Tensor], precision: str, device: torch.device) -> float:
    start = time.perf_counter()
    with autocast(precision, device):
        value = loss(model)
    # Not backward(): gradients that the caller has gathered stay as they are too.
    torch.autograd.grad(value, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
