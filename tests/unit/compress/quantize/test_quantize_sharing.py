"""Tests that layers with the same input tensor, and only those, share its rounding."""

import copy

import pytest
import torch
from torch import Tensor, nn

from compress.quantize import layers
from compress.quantize.fake_quantize import fake_quantize_tensor, fake_quantize_tokens
from compress.quantize.layers import InputGrid, QuantizedLinear
from compress.quantize.schemes import resolve_scheme


def grid(*, learned: bool = False) -> InputGrid:
    return InputGrid(torch.tensor(-2.0), torch.tensor(3.0), learned=learned)


def values(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def test_rounding_is_reused_only_while_the_input_and_its_scale_are_unchanged():
    input_grid, x = grid(), values(4, 8)
    first = input_grid(x)
    assert input_grid(x) is first
    assert input_grid(x.clone()) is not first
    x.mul_(0.5)
    assert torch.equal(input_grid(x), fake_quantize_tensor(x, input_grid.scale, input_grid.zero))
    input_grid.scale.mul_(2)
    assert torch.equal(input_grid(x), fake_quantize_tensor(x, input_grid.scale, input_grid.zero))


def test_rounding_under_no_grad_is_not_reused_where_gradients_are_needed():
    input_grid, x = grid(learned=True), values(4, 8)
    with torch.no_grad():
        without_grad = input_grid(x)
    with_grad = input_grid(x)
    assert not without_grad.requires_grad
    assert with_grad.requires_grad
    with torch.inference_mode():
        inside = values(4, 8)
        assert torch.equal(input_grid(inside), input_grid(inside))


def test_a_copied_grid_does_not_reuse_the_originals_rounding():
    input_grid, x = grid(), values(4, 8)
    first = input_grid(x)
    copied = copy.deepcopy(input_grid)
    copied.scale.mul_(2)
    assert not torch.equal(copied(x), first)
    assert input_grid(x) is first


@pytest.mark.parametrize("scheme", ["int8-static", "int8-dynamic"])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_queries_keys_and_values_round_their_input_once(scheme: str, precision: torch.dtype, monkeypatch):
    linears = [QuantizedLinear.from_linear(nn.Linear(8, 8), resolve_scheme(scheme)) for _ in range(3)]
    shared, calls = grid(), []
    for layer in linears:
        layer.grid = shared if scheme == "int8-static" else None
    for name in ("fake_quantize_tensor", "fake_quantize_tokens"):
        plain = getattr(layers, name)
        monkeypatch.setattr(layers, name, lambda *args, plain=plain: calls.append(1) or plain(*args))
    x = values(2, 5, 8).requires_grad_()
    with torch.autocast("cpu", precision, enabled=precision != torch.float32):
        total = sum(layer(x).float().sum() for layer in linears)
    assert len(calls) == 1
    total.backward()
    assert torch.isfinite(x.grad).all()


def test_autocast_rounds_in_float32_before_casting_to_bfloat16():
    input_grid, x = grid(), values(64, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(input_grid(x), fake_quantize_tensor(x, input_grid.scale, input_grid.zero).bfloat16())
    assert torch.equal(fake_quantize_tokens(x, torch.bfloat16), fake_quantize_tokens(x).bfloat16())
