"""Training precision: modes that this device supports, and the fastest of them by measurement."""

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

MIN_SPEEDUP = 1.1  # a less exact precision must be this many times faster; smaller differences are noise
MAX_SLOWDOWN = 3.0  # a mode whose first pass is this many times slower than the best so far isn't measured further
DIVISOR = 16  # required divisor of both sizes of a layer for fp8 products


@dataclass(frozen=True)
class Mode:
    """A training precision mode.

    Args:
        name: Name of the mode in settings.
        about: Description of what is computed and stored in which precision.
        trainer: The `precision` argument of the Lightning trainer for this mode.
        computes: Dtype of products, as far as autocast determines it.
    """

    name: str
    about: str
    trainer: Any
    computes: torch.dtype = torch.float32

    @property
    def stock(self) -> bool:
        """Whether Lightning implements all of the mode: layers, weights and optimizer are unchanged."""
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


def unsupported_reason(name: str, device: torch.device) -> str:
    """Returns the reason why a device can't train in a mode; empty if it can.

    Raises:
        CompressError: The mode is unknown.
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
    """Checks that a device supports a mode.

    Raises:
        CompressError: The mode is unknown or not supported by the device.
    """
    why = unsupported_reason(name, device)
    if why:
        raise CompressError(f"machine.precision {name}: can't be on {device.type}: {why}")


def candidates(device: torch.device) -> tuple[str, ...]:
    """Returns the modes to try on a device; prototypes and modes with low-bit weights must be requested explicitly."""
    wanted = ("32", "bf16-mixed", "fp8") if device.type == "cuda" else ("32", "bf16-mixed")
    able = tuple(name for name in wanted if not unsupported_reason(name, device))
    return able if len(able) > 1 or device.type != "cuda" else (*able, "16-mixed")


def convert_for(name: str, model: nn.Module, *, emulate: bool = False) -> nn.Module:
    """Converts the model in place for training in a mode; parameters keep their names.

    Args:
        name: Name of the mode.
        model: A float32 model.
        emulate: Whether to emulate fp8 on a device without it, for tests: the same rounding, not its speed.
    """
    if name == "bf16-stochastic":
        return model.bfloat16()
    if name == "fp8":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        # Without padding, fp8 products require a multiple of 16 tokens, which few batches have.
        settings = Float8LinearConfig(emulate=emulate, pad_inner_dim=True)
        convert_to_float8_training(model, config=settings, module_filter_fn=supports_8bit)
    if name == "int8-mixed":
        from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig
        from torchao.quantization import quantize_

        # Without module_swap torchao 0.18 silently leaves the products in float.
        quantize_(model, Int8MixedPrecisionTrainingConfig(module_swap=True), filter_fn=supports_8bit)
        for layer in model.modules():
            if type(layer).__module__.startswith("torchao."):
                layer.register_forward_hook(contiguous_gradient_hook)
    return model


class ContiguousGradient(torch.autograd.Function):
    """An identity that makes the gradient contiguous: torchao 0.18 accepts no other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


def contiguous_gradient_hook(layer: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> Tensor:
    return ContiguousGradient.apply(out)


def supports_8bit(module: nn.Module, name: str) -> bool:
    """Returns whether a layer's products can be in 8 bits; a head of 77 classes, for example, can't."""
    if type(module) is not nn.Linear:  # layers with their own quantization are left unchanged
        return False
    return module.in_features % DIVISOR == 0 and module.out_features % DIVISOR == 0


def as_stock(model: nn.Module) -> nn.Module:
    """Restores stock layers and float32 weights, in place, of a model that `convert_for` converted."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and type(layer).__module__.startswith("torchao."):
            replace(model, name, linear_as(nn.Linear, layer))
    return model.float()


def optimizer_for(name: str) -> Callable[..., torch.optim.Optimizer] | None:
    """Returns the optimizer that a mode requires, with AdamW's call signature; None if any will do."""
    if name != "bf16-stochastic":
        return None
    from torchao.optim import _AdamW

    def stochastic(params: Iterable[Any], lr: float) -> torch.optim.Optimizer:
        return _AdamW(params, lr=lr, bf16_stochastic_round=True)

    return stochastic


def autocast(precision: str, device: torch.device) -> AbstractContextManager:
    """Returns the context in which Lightning would run a step of that mode."""
    kind = MODES[precision].computes
    return nullcontext() if kind == torch.float32 else torch.autocast(device.type, kind)


def measure_precisions(
    model: nn.Module, losses: Sequence[Callable[[nn.Module], Tensor]], precisions: Sequence[str], steps: int = 3
) -> dict[str, float]:
    """Returns the seconds of a step in each mode: forward and backward of `loss(model)`.

    The time is the mean over `losses`, each of its own batch, and of that the median of `steps` passes. Weights and
    gradients aren't modified. A mode whose first pass is much slower than the best (HOPELESS) isn't measured further
    and is reported with that pass.
    """
    device = next(model.parameters()).device
    seconds: dict[str, float] = {}
    for precision in precisions:
        timed = model if MODES[precision].stock else convert_for(precision, copy.deepcopy(model))
        if device.type == "cuda":
            timed_pass(timed, losses, precision, device)  # loads the kernels
        first = timed_pass(timed, losses, precision, device)
        if seconds and first > MAX_SLOWDOWN * min(seconds.values()):
            seconds[precision] = first
            continue
        times = sorted(timed_pass(timed, losses, precision, device) for _ in range(steps))
        seconds[precision] = times[len(times) // 2]
    return seconds


def fastest(seconds: Mapping[str, float]) -> str:
    """Returns the fastest mode; `32` unless another is clearly faster."""
    best = min(seconds, key=lambda name: seconds[name])
    return "32" if seconds.get("32", float("inf")) < MIN_SPEEDUP * seconds[best] else best


def timed_pass(
    model: nn.Module, losses: Sequence[Callable[[nn.Module], Tensor]], precision: str, device: torch.device
) -> float:
    """Returns the mean seconds of a step over the batches."""
    return sum(timed_step(model, loss, precision, device) for loss in losses) / len(losses)


def timed_step(model: nn.Module, loss: Callable[[nn.Module], Tensor], precision: str, device: torch.device) -> float:
    start = time.perf_counter()
    with autocast(precision, device):
        value = loss(model)
    # Not backward(), so that gradients accumulated by the caller stay unchanged.
    torch.autograd.grad(value, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def peak_flops(device: torch.device, kind: torch.dtype, size: int = 1024, rounds: int = 5) -> float:
    """Returns the floating-point operations per second of a square matrix product: an upper bound on training speed."""
    a = torch.randn(size, size, device=device).to(kind)
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times[1:])
