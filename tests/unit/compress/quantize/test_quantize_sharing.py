"""Layers that read the same tensor share its rounding, and nothing else does."""

import copy

import pytest
import torch
from torch import Tensor, nn

from compress.quantize import layers
from compress.quantize.grid import snapped, token_snapped
from compress.quantize.layers import InputGrid, QuantizedLinear
from compress.quantize.schemes import scheme_of


def grid(*, learned: bool = False) -> InputGrid:
    return InputGrid(torch.tensor(-2.0), torch.tensor(3.0), learned=learned)


def values(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def test_what_was_read_before_is_given_for_something_else():
    own, x = grid(), values(4, 8)
    first = own(x)
    assert own(x) is first
    assert own(x.clone()) is not first
    x.mul_(0.5)
    assert torch.equal(own(x), snapped(x, own.scale, own.zero))
    own.scale.mul_(2)
    assert torch.equal(own(x), snapped(x, own.scale, own.zero))


def test_a_tensor_without_gradients_is_given_where_they_are_needed():
    own, x = grid(learned=True), values(4, 8)
    with torch.no_grad():
        seen = own(x)
    again = own(x)
    assert not seen.requires_grad
    assert again.requires_grad
    with torch.inference_mode():
        inside = values(4, 8)
        assert torch.equal(own(inside), own(inside))


def test_a_copy_gives_what_the_original_read():
    own, x = grid(), values(4, 8)
    first = own(x)
    made = copy.deepcopy(own)
    made.scale.mul_(2)
    assert not torch.equal(made(x), first)
    assert own(x) is first


@pytest.mark.parametrize("scheme", ["int8-static", "int8-dynamic"])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_queries_keys_and_values_round_three_times(scheme: str, precision: torch.dtype, monkeypatch):
    found = [QuantizedLinear.of(nn.Linear(8, 8), scheme_of(scheme)) for _ in range(3)]
    shared, calls = grid(), []
    for layer in found:
        layer.grid = shared if scheme == "int8-static" else None
    for name in ("snapped", "token_snapped"):
        plain = getattr(layers, name)
        monkeypatch.setattr(layers, name, lambda *given, plain=plain: calls.append(1) or plain(*given))
    x = values(2, 5, 8).requires_grad_()
    with torch.autocast("cpu", precision, enabled=precision != torch.float32):
        total = sum(layer(x).float().sum() for layer in found)
    assert len(calls) == 1
    total.backward()
    assert torch.isfinite(x.grad).all()


def test_bfloat16_moves_values_to_other_steps():
    own, x = grid(), values(64, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(own(x), snapped(x, own.scale, own.zero).bfloat16())
    assert torch.equal(token_snapped(x, torch.bfloat16), token_snapped(x).bfloat16())
