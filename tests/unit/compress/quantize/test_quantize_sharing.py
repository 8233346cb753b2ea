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
    own, x = grid(), values(4, 8)
    first = own(x)
    assert own(x) is first
    assert own(x.clone()) is not first
    x.mul_(0.5)
    assert torch.equal(own(x), fake_quantize_tensor(x, own.scale, own.zero))
    own.scale.mul_(2)
    assert torch.equal(own(x), fake_quantize_tensor(x, own.scale, own.zero))


def test_rounding_under_no_grad_is_not_reused_where_gradients_are_needed():
    own, x = grid(learned=True), values(4, 8)
    with torch.no_grad():
        seen = own(x)
    again = own(x)
    assert not seen.requires_grad
    assert again.requires_grad
    with torch.inference_mode():
        inside = values(4, 8)
        assert torch.equal(own(inside), own(inside))


def test_a_copied_grid_does_not_reuse_the_originals_rounding():
    own, x = grid(), values(4, 8)
    first = own(x)
    made = copy.deepcopy(own)
    made.scale.mul_(2)
    assert not torch.equal(made(x), first)
    assert own(x) is first


@pytest.mark.parametrize("scheme", ["int8-static", "int8-dynamic"])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_queries_keys_and_values_round_their_input_once(scheme: str, precision: torch.dtype, monkeypatch):
    found = [QuantizedLinear.from_linear(nn.Linear(8, 8), resolve_scheme(scheme)) for _ in range(3)]
    shared, calls = grid(), []
    for layer in found:
        layer.grid = shared if scheme == "int8-static" else None
    for name in ("fake_quantize_tensor", "fake_quantize_tokens"):
        plain = getattr(layers, name)
        monkeypatch.setattr(layers, name, lambda *given, plain=plain: calls.append(1) or plain(*given))
    x = values(2, 5, 8).requires_grad_()
    with torch.autocast("cpu", precision, enabled=precision != torch.float32):
        total = sum(layer(x).float().sum() for layer in found)
    assert len(calls) == 1
    total.backward()
    assert torch.isfinite(x.grad).all()


def test_autocast_rounds_in_float32_before_casting_to_bfloat16():
    own, x = grid(), values(64, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(own(x), fake_quantize_tensor(x, own.scale, own.zero).bfloat16())
    assert torch.equal(fake_quantize_tokens(x, torch.bfloat16), fake_quantize_tokens(x).bfloat16())
