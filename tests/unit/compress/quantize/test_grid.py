"""Tests rounding to integer grids: weights per row and group, activations per tensor and token."""

import pytest
import torch

from compress.errors import CompressError
from compress.quantize.fake_quantize import fake_quantize_tensor, fake_quantize_tokens, fake_quantize_weight
from compress.quantize.grid import compute_tensor_grid, compute_token_grid, compute_weight_scales, quantize_weight
from compress.quantize.schemes import INT8, NumberFormat


def seeded(number: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def weights(rows: int = 24, inputs: int = 64) -> torch.Tensor:
    return torch.randn(rows, inputs, generator=seeded(1)) * torch.rand(rows, 1, generator=seeded(2))


@pytest.mark.parametrize(("largest", "group"), [(127, 0), (63, 0), (7, 0), (7, 32), (127, 16)])
def test_weights_round_by_at_most_half_a_step_onto_a_stable_grid(largest: int, group: int):
    weight, numbers = weights(), NumberFormat(largest)
    scales = compute_weight_scales(weight, numbers, group)
    rounded, whole = fake_quantize_weight(weight, scales, numbers), quantize_weight(weight, scales, numbers)
    each = scales.repeat_interleave(64 // scales.shape[1], dim=1)
    assert scales.shape == (24, 64 // (group or 64))
    assert ((rounded - weight).abs() <= each * 0.5001).all()
    assert whole.abs().max() == largest
    torch.testing.assert_close(whole * each, rounded, rtol=1e-6, atol=0)
    assert torch.equal(quantize_weight(rounded, scales, numbers), whole)


def test_a_zero_weight_stays_zero():
    weight = torch.zeros(2, 8)
    assert torch.equal(fake_quantize_weight(weight, compute_weight_scales(weight, INT8), INT8), weight)


def test_a_group_size_that_does_not_divide_the_row_is_rejected():
    with pytest.raises(CompressError, match="divisible by the group size 32, found 48"):
        compute_weight_scales(torch.ones(2, 48), NumberFormat(7), 32)


def test_gradients_pass_straight_through_the_rounding():
    weight = weights().requires_grad_()
    upstream = torch.randn(24, 64, generator=seeded())
    (fake_quantize_weight(weight, compute_weight_scales(weight.detach(), INT8), INT8) * upstream).sum().backward()
    assert torch.equal(weight.grad, upstream)
    x = torch.randn(5, 64, generator=seeded(4), requires_grad=True)
    (fake_quantize_tokens(x) * upstream[:5]).sum().backward()
    assert torch.equal(x.grad, upstream[:5])


def test_tensor_rounding_matches_affine_fake_quantization():
    x = torch.randn(50, 8, generator=seeded()) * 3
    scale, zero = compute_tensor_grid(torch.tensor(-2.0), torch.tensor(5.0))
    expected = torch.fake_quantize_per_tensor_affine(x.double(), float(scale), int(zero), 0, 255)
    torch.testing.assert_close(fake_quantize_tensor(x, scale, zero).double(), expected, rtol=1e-6, atol=1e-6)
    assert fake_quantize_tensor(torch.zeros(1), scale, zero) == 0
    assert fake_quantize_tensor(torch.tensor([9.0]), scale, zero) == pytest.approx(5.0, abs=float(scale))


def test_clipped_values_get_no_gradient():
    x = torch.tensor([-3.0, -1.0, 4.0, 6.0], requires_grad=True)
    fake_quantize_tensor(x, *compute_tensor_grid(torch.tensor(-2.0), torch.tensor(5.0))).sum().backward()
    assert x.grad.tolist() == [0.0, 1.0, 1.0, 0.0]


def test_the_gradient_of_a_learned_input_scale_matches_the_lsq_paper():
    x = torch.tensor([-3.0, -1.3, 4.1, 6.0])
    scale, zero = compute_tensor_grid(torch.tensor(-2.0), torch.tensor(5.0))
    scale = scale.requires_grad_()
    upstream = torch.tensor([0.5, -1.0, 2.0, 0.25])
    (fake_quantize_tensor(x, scale, zero) * upstream).sum().backward()
    s, z = float(scale.detach()), float(zero)
    inside = [round(v / s) - v / s for v in (-1.3, 4.1)]
    slopes = torch.tensor([-z, *inside, 255 - z])
    expected = (upstream * slopes).sum() / (4 * 127) ** 0.5
    assert float(scale.grad) == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize("group", [0, 32])
def test_the_gradient_of_learned_weight_scales_matches_the_lsq_paper(group: int):
    weight, upstream = weights(), torch.randn(24, 64, generator=seeded())
    scales = 0.4 * compute_weight_scales(weight, NumberFormat(7), group)  # small enough that some weights are clipped
    leaf, learned = weight.clone().requires_grad_(), scales.clone().requires_grad_()
    rounded = fake_quantize_weight(leaf, learned, NumberFormat(7))
    (rounded * upstream).sum().backward()
    assert torch.equal(rounded, fake_quantize_weight(weight, scales, NumberFormat(7)))
    each = scales.double().repeat_interleave(64 // scales.shape[1], dim=1)
    steps = weight.double() / each
    inside = (steps > -7.5) & (steps < 7.5)
    assert 0 < inside.sum() < inside.numel()
    slope = torch.where(inside, steps.round() - steps, 7 * steps.sign())
    expected = (upstream * slope).view(*scales.shape, -1).sum(-1)
    torch.testing.assert_close(learned.grad.double(), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(leaf.grad, upstream * inside)


def test_each_token_has_its_own_scale():
    x = torch.randn(2, 3, 16, generator=seeded()) * torch.tensor([1.0, 10.0, 100.0])[:, None]
    rounded, (scales, zeros) = fake_quantize_tokens(x), compute_token_grid(x)
    assert scales.shape == zeros.shape == (2, 3, 1)
    assert ((rounded - x).abs() <= scales * 0.5001).all()
    assert torch.equal(fake_quantize_tokens(x[:, 1]), rounded[:, 1])
