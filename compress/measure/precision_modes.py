"""Training precisions: what each mode computes, where it is supported, and conversion of a model to a mode."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from compress.errors import CompressError
from compress.quantize.layers import rebuild_linear
from compress.quantize.prepare import replace_module

DIVISOR = 16  # required divisor of both sizes of a layer for products in 8 bits


@dataclass(frozen=True)
class PrecisionMode:
    """A training precision.

    Args:
        name: Name of the mode in settings.
        description: What is computed and stored in which precision.
        trainer_precision: The `precision` argument of the Lightning trainer for this mode.
        product_dtype: Dtype of products, as far as autocast determines it.
        stochastic_rounding: Whether the weights are bfloat16, to which the optimizer rounds its updates stochastically.
    """

    name: str
    description: str
    trainer_precision: Literal["32", "bf16-mixed", "16-mixed"]
    product_dtype: torch.dtype = torch.float32
    stochastic_rounding: bool = False

    @property
    def is_stock(self) -> bool:
        """Whether Lightning implements all of the mode: layers, weights and optimizer are unchanged."""
        return self.trainer_precision == self.name


MODES: Mapping[str, PrecisionMode] = {
    mode.name: mode
    for mode in (
        PrecisionMode("32", "weights, products and optimizer in float32", "32"),
        PrecisionMode(
            "bf16-mixed",
            "products in bfloat16 by autocast; weights and optimizer in float32",
            "bf16-mixed",
            torch.bfloat16,
        ),
        PrecisionMode(
            "16-mixed",
            "products in float16 by autocast, with loss scaling; weights and optimizer in float32",
            "16-mixed",
            torch.float16,
        ),
        PrecisionMode(
            "bf16-stochastic",
            "weights, gradients and optimizer in bfloat16, half the memory, with stochastic rounding of updates, so "
            "that small ones aren't lost; a prototype in torchao",
            "32",
            stochastic_rounding=True,
        ),
        PrecisionMode(
            "fp8", "products of linear layers in float8, the rest as in bf16-mixed", "bf16-mixed", torch.bfloat16
        ),
        PrecisionMode(
            "int8-mixed",
            "products of linear layers in int8, forward and backward; weights in float32; a prototype in torchao",
            "32",
        ),
    )
}


def find_unsupported_reason(name: str, device: torch.device) -> str:
    """Returns the reason why a device can't train in a mode; empty if it can.

    Raises:
        CompressError: The mode is unknown.
    """
    if name not in MODES:
        raise CompressError(f"machine.precision: expected auto or one of {', '.join(MODES)}, found {name!r}")
    on_gpu = device.type == "cuda"
    if name == "16-mixed" and not on_gpu:
        return "on a CPU float16 products are slower than float32 products; use bf16-mixed"
    if name == "fp8" and not (on_gpu and torch.cuda.get_device_capability(device) >= (8, 9)):
        return "float8 products need a GPU with compute capability 8.9 or higher"
    if name == "bf16-mixed" and on_gpu and not torch.cuda.is_bf16_supported():
        return "this GPU has no bfloat16 products; use 16-mixed"
    return ""


def check_mode(name: str, device: torch.device) -> None:
    """Checks that a device supports a mode.

    Raises:
        CompressError: The mode is unknown or not supported by the device.
    """
    reason = find_unsupported_reason(name, device)
    if reason:
        raise CompressError(
            f"machine.precision: expected a precision that {device.type} supports, found {name}: {reason}"
        )


def list_candidate_modes(device: torch.device) -> tuple[str, ...]:
    """Returns the modes to measure on a device; prototypes and modes with low-bit weights must be requested."""
    names = ("32", "bf16-mixed", "fp8") if device.type == "cuda" else ("32", "bf16-mixed")
    supported = tuple(name for name in names if not find_unsupported_reason(name, device))
    return supported if len(supported) > 1 or device.type != "cuda" else (*supported, "16-mixed")


def convert_to_mode(name: str, model: nn.Module, *, emulate: bool = False) -> nn.Module:
    """Converts the model in place for training in a mode, and returns it; parameters keep their names.

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
        convert_to_float8_training(model, config=settings, module_filter_fn=_supports_8bit)
    if name == "int8-mixed":
        from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig
        from torchao.quantization import quantize_

        # Without module_swap torchao 0.18 silently leaves the products in float.
        quantize_(model, Int8MixedPrecisionTrainingConfig(module_swap=True), filter_fn=_supports_8bit)
        for layer in model.modules():
            if type(layer).__module__.startswith("torchao."):
                layer.register_forward_hook(_make_gradient_contiguous)
    return model


def restore_stock_layers(model: nn.Module) -> nn.Module:
    """Restores stock layers and float32 weights, in place, of a model that `convert_to_mode` converted."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and type(layer).__module__.startswith("torchao."):
            replace_module(model, name, rebuild_linear(nn.Linear, layer))
    return model.float()


class _ContiguousGradient(torch.autograd.Function):
    """An identity that makes the gradient contiguous: torchao 0.18 accepts no other."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


def _make_gradient_contiguous(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    unchanged: Tensor = _ContiguousGradient.apply(output)
    return unchanged


def _supports_8bit(module: nn.Module, name: str) -> bool:
    """Returns whether a layer's products can be in 8 bits; a head of 77 classes, for example, can't."""
    if type(module) is not nn.Linear:  # layers with their own quantization are left unchanged
        return False
    return module.in_features % DIVISOR == 0 and module.out_features % DIVISOR == 0
