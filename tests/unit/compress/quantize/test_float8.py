"""Tests 8-bit float weights and inputs: the rounding itself, and agreement with torch and torchao."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from compress.errors import CompressError
from compress.export.common.targets import FORMATS, by_scheme, find_target
from compress.export.pytorch.torchao import float_tensor
from compress.quantize.config import QuantizeConfig
from compress.quantize.fake_quantize import fake_quantize_float8, fake_quantize_weight
from compress.quantize.gptq import round_with_gptq
from compress.quantize.grid import (
    compute_float8_scales,
    compute_weight_scales,
    is_near_float8_tie,
    quantize_weight,
    round_to_nearest_,
)
from compress.quantize.prepare import (
    LayerQuantization,
    convert_quantized,
    find_lowest_precision,
    prepare_quantized,
)
from compress.quantize.schemes import FLOAT8, reduce_weight_range, resolve_scheme, widen_scheme
from support.tiny_families import build
from support.tiny_models import build_model


def seeded(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def all_e4m3_numbers() -> torch.Tensor:
    """All finite E4M3 numbers in order, decoded from their bits: sign, 4 exponent bits, 3 fraction bits."""
    numbers = []
    for byte in range(127):  # the last is NaN
        exponent, fraction = byte >> 3, byte & 7
        numbers.append((fraction / 8) * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7))
    positive = torch.tensor(numbers, dtype=torch.float64)
    return torch.cat([-positive[1:].flip(0), positive])


def round_exhaustively(steps: torch.Tensor) -> torch.Tensor:
    """Rounds each value to the nearest E4M3 number by exhaustive search."""
    numbers = all_e4m3_numbers()
    return numbers[(steps.double()[..., None] - numbers).abs().argmin(-1)]


def test_weights_round_to_the_nearest_e4m3_number():
    weight = seeded(24, 64) * seeded(24, 1, seed=4).exp()
    scales = compute_weight_scales(weight, FLOAT8)
    assert torch.equal(scales[:, 0], weight.abs().amax(1) / 448)
    rounded = fake_quantize_weight(weight, scales, FLOAT8)
    torch.testing.assert_close(rounded.double(), round_exhaustively(weight / scales) * scales, rtol=1e-6, atol=0)
    numbers = quantize_weight(weight, scales, FLOAT8)
    assert numbers.dtype == torch.float8_e4m3fn
    assert torch.equal(quantize_weight(rounded, scales, FLOAT8).view(torch.uint8), numbers.view(torch.uint8))


def test_rounding_matches_torch_including_ties():
    numbers = all_e4m3_numbers().float()
    ties = (numbers[1:] + numbers[:-1]) / 2
    beside = [torch.nextafter(ties, torch.full_like(ties, end)) for end in (-1e9, 1e9)]
    values = torch.cat([numbers, ties, *beside, seeded(10_000) * 100, seeded(10_000) / 100])
    assert torch.equal(round_to_nearest_(values.clone(), FLOAT8), values.to(torch.float8_e4m3fn).float())


def test_values_beyond_the_largest_number_saturate():
    weight = torch.tensor([[1.0, 2.0, -3.0, 470.0]])
    assert fake_quantize_weight(weight, torch.ones(1, 1), FLOAT8).tolist() == [[1.0, 2.0, -3.0, 448.0]]


def test_a_zero_tensor_stays_zero():
    assert torch.equal(fake_quantize_float8(torch.zeros(2, 8)), torch.zeros(2, 8))


def test_each_token_has_its_own_scale_and_rounds_to_the_nearest_number():
    x = seeded(2, 3, 16) * torch.tensor([1.0, 10.0, 100.0])[:, None]
    rounded, scales = fake_quantize_float8(x), compute_float8_scales(x)
    assert scales.shape == (2, 3, 1)
    torch.testing.assert_close(rounded.double(), round_exhaustively(x / scales) * scales, rtol=1e-6, atol=0)
    assert torch.equal(fake_quantize_float8(x[:, 1]), rounded[:, 1])


def test_gradients_pass_straight_through_the_rounding():
    x, weight, upstream = seeded(5, 64).requires_grad_(), seeded(5, 64, seed=4).requires_grad_(), seeded(5, 64, seed=5)
    (fake_quantize_float8(x) * upstream).sum().backward()
    (fake_quantize_weight(weight, compute_weight_scales(weight.detach(), FLOAT8), FLOAT8) * upstream).sum().backward()
    assert torch.equal(x.grad, upstream)
    assert torch.equal(weight.grad, upstream)


def test_the_gradient_of_a_learned_scale_matches_the_rounding_errors():
    weight = seeded(8, 64)
    scales = (0.7 * compute_weight_scales(weight, FLOAT8)).requires_grad_()
    fake_quantize_weight(weight, scales, FLOAT8).sum().backward()
    steps = weight.double() / scales.detach()
    slope = torch.where(steps.abs() <= 464, round_exhaustively(steps) - steps, 448 * steps.sign())
    assert (steps.abs() > 464).any()
    torch.testing.assert_close(scales.grad[:, 0].double(), slope.sum(1), rtol=1e-3, atol=1e-2)


def test_near_float_tie_marks_exactly_the_values_close_to_a_tie():
    # 448 sets the scale to 1; numbers between 16 and 32 are 2 apart, numbers below 2**-6 are 2**-9 apart
    x = torch.tensor([[448.0, 17.0, 16.6, 2.5 * 2**-9, 2.2 * 2**-9, -17.0, 0.0]])
    assert is_near_float8_tie(x, 1e-4).tolist() == [[False, True, False, True, False, True, False]]


def test_torchao_products_match_the_rounded_weights():
    weight, x, bias = seeded(24, 64), seeded(2, 5, 64, seed=4) * 3, seeded(24, seed=5)
    scales = compute_weight_scales(weight, FLOAT8)
    for scheme, inputs in (
        (resolve_scheme("fp8-weights"), x),
        (resolve_scheme("fp8-dynamic"), fake_quantize_float8(x)),
    ):
        found = F.linear(x, float_tensor(weight, LayerQuantization(scheme, scales)), bias)
        expected = F.linear(inputs, fake_quantize_weight(weight, scales, FLOAT8), bias)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_gptq_reduces_the_output_error_of_float8_weights():
    weight = seeded(40, 160)
    x = seeded(500, 16, seed=4) @ seeded(16, 160, seed=5) + 0.1 * seeded(500, 160, seed=6)
    scales = compute_weight_scales(weight, FLOAT8)
    nearest, compensated = (
        fake_quantize_weight(weight, scales, FLOAT8),
        round_with_gptq(weight, x.T @ x, scales, FLOAT8),
    )
    errors = [float((x @ (each - weight).T).square().mean()) for each in (nearest, compensated)]
    assert errors[1] < 0.7 * errors[0]
    torch.testing.assert_close(fake_quantize_weight(compensated, scales, FLOAT8), compensated, rtol=1e-5, atol=1e-6)


def test_quantization_aware_training_learns_and_converts_to_the_trained_float8_weights(token_batch):
    model = build_model("bert")
    prepare_quantized(model, resolve_scheme("fp8-dynamic"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)  # at 0.1 the loss oscillates
    losses = []
    for _ in range(4):
        loss = F.cross_entropy(model(**token_batch).logits, torch.arange(len(token_batch["input_ids"])) % 2)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    with torch.no_grad():
        trained = model.bert.encoder.layer[0].output.dense.round_weight()
    quantization = convert_quantized(model)
    assert find_lowest_precision(quantization) == "fp8"
    assert torch.equal(model.bert.encoder.layer[0].output.dense.weight, trained)


def test_the_language_modelling_head_has_int8_weights_under_fp8_dynamic():
    model = build("qwen2", hidden_size=64, intermediate_size=96)
    prepare_quantized(model, resolve_scheme("fp8-dynamic"))
    quantization = convert_quantized(model)
    head = next(name for name, layer in model.named_modules() if layer is model.get_output_embeddings())
    assert quantization[head].scheme == resolve_scheme("int8-weights")
    assert find_lowest_precision(quantization) == "fp8"
    assert isinstance(model.get_submodule(head), nn.Linear)


def test_reduced_range_is_rejected_for_float8_schemes():
    assert reduce_weight_range(resolve_scheme("fp8-dynamic")) == resolve_scheme("fp8-dynamic")
    assert widen_scheme(resolve_scheme("fp8-weights")) is None
    with pytest.raises(CompressError, match="quantize.reduce_range: expected a scheme with integer products"):
        QuantizeConfig(scheme="fp8-dynamic", reduce_range=True)


def test_runtimes_without_float8_products_reject_fp8():
    for name in ("onnx", "onnxruntime", "openvino", "executorch", "litert"):
        with pytest.raises(CompressError, match=f"export {name}: doesn't support fp8: .* fp8"):
            by_scheme([name], "fp8")
    assert by_scheme(["torchao", "compressed-tensors"], "fp8") == {"fp8-dynamic": ["torchao", "compressed-tensors"]}
    assert find_target("torchao-fp8").where == (FORMATS["torchao"].runtime, "fp8")
