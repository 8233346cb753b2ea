"""How training computes: what this machine can, and what was faster here; measured, not assumed."""

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compress.errors import CompressError
from compress.quantize.layers import linear_as
from compress.quantize.prepare import replace

WORTH = 1.1  # a precision that rounds more has to be this many times faster: nearer ones change places by chance
HOPELESS = 3.0  # a first step this many times slower than the best so far ends the trial
DIVISOR = 16  # of both sizes of a layer that fp8's products take


@dataclass(frozen=True)
class Mode:
    """A way of training.

    Args:
        name: As it is asked for.
        about: What is in how many bits.
        trainer: Lightning's name of what it does of this.
        computes: What products are computed in, as far as autocast has a say.
    """

    name: str
    about: str
    trainer: Any
    computes: torch.dtype = torch.float32

    @property
    def stock(self) -> bool:
        """Whether Lightning does all of it: layers, weights and optimizer stay as they are."""
        return bool(self.trainer == self.name)


MODES: Mapping[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode("32", "weights, products and optimizer in float32", "32"),
        Mode(
            "bf16-mixed",
            "products in bfloat16 by autocast; weights and optimizer in float32",
            "bf16-mixed",
            torch.bfloat16,
        ),
        Mode(
            "16-mixed",
            "products in float16 by autocast, the loss scaled; weights and optimizer in float32",
            "16-mixed",
            torch.float16,
        ),
        Mode(
            "bf16-stochastic",
            "weights, gradients and optimizer in bfloat16, each update rounded up or down by chance, so that small "
            "ones aren't lost: half the memory; a prototype of torchao's",
            "32",
        ),
        Mode("fp8", "products of linear layers in float8, the rest by bf16-mixed", "bf16-mixed", torch.bfloat16),
        Mode(
            "int8-mixed",
            "products of linear layers in int8, forward and backward; weights in float32; a prototype of torchao's",
            "32",
        ),
    )
}


def why_not(name: str, device: torch.device) -> str:
    """Why a device can't train so; empty where it can.

    Raises:
        CompressError: A mode that isn't known.
    """
    if name not in MODES:
        raise CompressError(f"machine.precision: expected auto or one of {', '.join(MODES)}, found {name!r}")
    on_gpu = device.type == "cuda"
    if name == "16-mixed" and not on_gpu:
        return "float16's products are slower than float32's on a CPU, and bfloat16's are as small"
    if name == "fp8" and not (on_gpu and torch.cuda.get_device_capability(device) >= (8, 9)):
        return "it takes a GPU of compute capability 8.9 or more"
    if name == "bf16-mixed" and on_gpu and not torch.cuda.is_bf16_supported():
        return "this GPU has no bfloat16; 16-mixed is for it"
    return ""


def check_mode(name: str, device: torch.device) -> None:
    """
    Raises:
        CompressError: A mode that isn't known, or that the device hasn't.
    """
    why = why_not(name, device)
    if why:
        raise CompressError(f"machine.precision {name}: can't be on {device.type}: {why}")


def candidates(device: torch.device) -> tuple[str, ...]:
    """Modes worth trying on a device; those that are prototypes or keep weights in few bits have to be asked for."""
    wanted = ("32", "bf16-mixed", "fp8") if device.type == "cuda" else ("32", "bf16-mixed")
    able = tuple(name for name in wanted if not why_not(name, device))
    return able if len(able) > 1 or device.type != "cuda" else (*able, "16-mixed")


def made_for(name: str, model: nn.Module, *, emulate: bool = False) -> nn.Module:
    """The model as a mode trains it, in place; parameters keep their names.

    Args:
        name: Of the mode.
        model: In float32.
        emulate: fp8 on a device that has none, for tests: the same rounding, not its speed.
    """
    if name == "bf16-stochastic":
        return model.bfloat16()
    if name == "fp8":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        # Without padding its products want as many tokens as 16 divides, which few batches have.
        settings = Float8LinearConfig(emulate=emulate, pad_inner_dim=True)
        convert_to_float8_training(model, config=settings, module_filter_fn=divides)
    if name == "int8-mixed":
        from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig
        from torchao.quantization import quantize_

        # Without module_swap torchao 0.18 leaves the products in float and doesn't say so.
        quantize_(model, Int8MixedPrecisionTrainingConfig(module_swap=True), filter_fn=divides)
        for layer in model.modules():
            if type(layer).__module__.startswith("torchao."):
                layer.register_forward_hook(straightened)
    return model


class Straightened(torch.autograd.Function):
    """Passes its input on, and the gradient as one piece of memory: torchao 0.18 takes no other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


def straightened(layer: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> Tensor:
    return Straightened.apply(out)


def divides(module: nn.Module, name: str) -> bool:
    """Whether a layer's products can be in 8 bits: a head of 77 classes can't."""
    if type(module) is not nn.Linear:  # a layer that rounds by itself stays what it is
        return False
    return module.in_features % DIVISOR == 0 and module.out_features % DIVISOR == 0


def as_stock(model: nn.Module) -> nn.Module:
    """A model that was `made_for` a mode with stock layers and float32 weights again, in place."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and type(layer).__module__.startswith("torchao."):
            replace(model, name, linear_as(nn.Linear, layer))
    return model.float()


def optimizer_for(name: str) -> Callable[..., torch.optim.Optimizer] | None:
    """The optimizer that a mode needs, called as AdamW is; None: any."""
    if name != "bf16-stochastic":
        return None
    from torchao.optim import _AdamW

    def stochastic(params: Iterable[Any], lr: float) -> torch.optim.Optimizer:
        return _AdamW(params, lr=lr, bf16_stochastic_round=True)

    return stochastic


def autocast(precision: str, device: torch.device) -> AbstractContextManager:
    """The context in which Lightning would run a step of that mode."""
    kind = MODES[precision].computes
    return nullcontext() if kind == torch.float32 else torch.autocast(device.type, kind)


def measure_precisions(
    model: nn.Module, losses: Sequence[Callable[[nn.Module], Tensor]], precisions: Sequence[str], steps: int = 3
) -> dict[str, float]:
    """Seconds of a step in each mode: forward and backward of `loss(model)`, the mean over `losses`, each of a batch of
    its own, and of that the median of `steps` passes. Weights and gradients stay the same.

    A mode whose first pass is hopelessly slow is not measured further and reported with that pass.
    """
    device = next(model.parameters()).device
    seconds: dict[str, float] = {}
    for precision in precisions:
        timed = model if MODES[precision].stock else made_for(precision, copy.deepcopy(model))
        if device.type == "cuda":
            timed_pass(timed, losses, precision, device)  # loads the kernels
        first = timed_pass(timed, losses, precision, device)
        if seconds and first > HOPELESS * min(seconds.values()):
            seconds[precision] = first
            continue
        times = sorted(timed_pass(timed, losses, precision, device) for _ in range(steps))
        seconds[precision] = times[len(times) // 2]
    return seconds


def fastest(seconds: Mapping[str, float]) -> str:
    """The fastest mode; `32` unless another is clearly faster."""
    best = min(seconds, key=lambda name: seconds[name])
    return "32" if seconds.get("32", float("inf")) < WORTH * seconds[best] else best


def timed_pass(
    model: nn.Module, losses: Sequence[Callable[[nn.Module], Tensor]], precision: str, device: torch.device
) -> float:
    """Mean seconds of a step over the batches."""
    return sum(timed_step(model, loss, precision, device) for loss in losses) / len(losses)


def timed_step(model: nn.Module, loss: Callable[[nn.Module], Tensor], precision: str, device: torch.device) -> float:
    start = time.perf_counter()
    with autocast(precision, device):
        value = loss(model)
    # Not backward(): gradients that the caller has gathered stay as they are too.
    torch.autograd.grad(value, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def ceiling(device: torch.device, kind: torch.dtype, size: int = 1024, rounds: int = 5) -> float:
    """Floating-point operations a second of a square matrix product: what training can't be faster than here."""
    a = torch.randn(size, size, device=device).to(kind)
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times[1:])
