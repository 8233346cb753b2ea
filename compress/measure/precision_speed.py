"""Speed of training precisions on this machine: seconds of a training step in each mode, and the fastest mode."""

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from compress.measure.precision_modes import MODES, convert_to_mode

MIN_SPEEDUP = 1.1  # a less exact precision must be this many times faster; smaller differences are noise
MAX_SLOWDOWN = 3.0  # a mode whose first pass is this many times slower than the best so far isn't measured further

ModelLoss = Callable[[nn.Module], Tensor]  # a model's scalar loss on one batch


def measure_modes(
    model: nn.Module, losses: Sequence[ModelLoss], modes: Sequence[str], steps: int = 3
) -> dict[str, float]:
    """Returns the seconds of a step in each mode: forward and backward of `loss(model)`.

    The time is the median of `steps` passes, each the mean over `losses`. Weights and gradients aren't modified. A mode
    whose first pass is more than MAX_SLOWDOWN times slower than the best isn't measured further and is reported with
    that pass.

    Args:
        model: A float32 model on the device to measure.
        losses: Losses, each on a batch of its own.
        modes: Names of the modes.
        steps: Passes in each mode, in addition to the first.
    """
    device = next(model.parameters()).device
    seconds: dict[str, float] = {}
    for name in modes:
        timed = model if MODES[name].is_stock else convert_to_mode(name, copy.deepcopy(model))
        if device.type == "cuda":
            _time_pass(timed, losses, name, device)  # loads the kernels
        first = _time_pass(timed, losses, name, device)
        if seconds and first > MAX_SLOWDOWN * min(seconds.values()):
            seconds[name] = first
            continue
        times = sorted(_time_pass(timed, losses, name, device) for _ in range(steps))
        seconds[name] = times[len(times) // 2]
    return seconds


def choose_fastest_mode(seconds: Mapping[str, float]) -> str:
    """Returns the fastest mode by its seconds per step; `32` unless another is at least MIN_SPEEDUP times faster."""
    best = min(seconds, key=lambda name: seconds[name])
    return "32" if seconds.get("32", float("inf")) < MIN_SPEEDUP * seconds[best] else best


def autocast_to_mode(name: str, device: torch.device) -> AbstractContextManager[object]:
    """Returns the context in which Lightning would run a step in a mode."""
    dtype = MODES[name].product_dtype
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)


def measure_peak_flops(device: torch.device, dtype: torch.dtype, size: int = 1024, rounds: int = 5) -> float:
    """Returns the floating-point operations per second of a square matrix product: an upper bound on training speed.

    Args:
        device: Where to multiply.
        dtype: Of the matrices.
        size: Number of their rows and columns.
        rounds: Number of products, of which the fastest counts.
    """
    matrix = torch.randn(size, size, device=device).to(dtype)
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        matrix @ matrix
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times[1:])


def _time_pass(model: nn.Module, losses: Sequence[ModelLoss], mode: str, device: torch.device) -> float:
    """Returns the mean seconds of a step over the batches."""
    return sum(_time_step(model, loss, mode, device) for loss in losses) / len(losses)


def _time_step(model: nn.Module, loss: ModelLoss, mode: str, device: torch.device) -> float:
    start = time.perf_counter()
    with autocast_to_mode(mode, device):
        value = loss(model)
    # Not backward(), so that gradients accumulated by the caller stay unchanged.
    torch.autograd.grad(value, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
