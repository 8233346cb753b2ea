"""Tests GPTQ, AWQ and SmoothQuant: smaller rounding errors and unchanged float models."""

import copy
import re

import pytest
import torch
from torch import nn

from compress.errors import CompressError
from compress.quantize.calibration import calibrate
from compress.quantize.channel_scales import apply_awq, apply_smoothquant
from compress.quantize.config import QuantizeConfig
from compress.quantize.fake_quantize import fake_quantize_weight
from compress.quantize.folds import Fold, apply_scales, find_folds, tie_scales
from compress.quantize.gptq import apply_gptq, round_with_gptq
from compress.quantize.grid import compute_weight_scales
from compress.quantize.layers import QuantizedLinear
from compress.quantize.model import quantize_model
from compress.quantize.prepare import convert_quantized, prepare_quantized
from compress.quantize.schemes import NumberFormat, resolve_scheme
from support.tiny_families import build
from support.tiny_models import build_model


def seeded(number: int = 4) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def correlated(tokens: int, inputs: int) -> torch.Tensor:
    """Correlated inputs of shape [tokens, inputs], like a model's activations."""
    latent = torch.randn(tokens, inputs // 4, generator=seeded(1))
    return latent @ torch.randn(inputs // 4, inputs, generator=seeded(2)) + 0.1 * torch.randn(
        tokens, inputs, generator=seeded(3)
    )


def token_batches(count: int = 3) -> list[dict[str, torch.Tensor]]:
    batches = []
    for number in range(count):
        ids = torch.randint(3, 60, (4, 12), generator=seeded(number))
        mask = torch.ones_like(ids)
        mask[1, 8:] = 0
        batches.append({"input_ids": ids * mask, "attention_mask": mask})
    return batches


@pytest.mark.parametrize(("largest", "group"), [(7, 0), (7, 32), (127, 0)])
def test_gptq_halves_the_output_error_of_nearest_rounding(largest: int, group: int):
    weight, x, numbers = torch.randn(40, 160, generator=seeded()), correlated(500, 160), NumberFormat(largest)
    scales = compute_weight_scales(weight, numbers, group)
    nearest, compensated = (
        fake_quantize_weight(weight, scales, numbers),
        round_with_gptq(weight, x.T @ x, scales, numbers),
    )
    errors = [float((x @ (each - weight).T).square().mean()) for each in (nearest, compensated)]
    assert errors[1] < 0.5 * errors[0]
    torch.testing.assert_close(fake_quantize_weight(compensated, scales, numbers), compensated, rtol=1e-5, atol=1e-6)


def test_gptq_equals_nearest_rounding_for_uncorrelated_inputs():
    weight = torch.randn(20, 64, generator=seeded())
    scales = compute_weight_scales(weight, NumberFormat(7))
    assert torch.equal(
        round_with_gptq(weight, torch.eye(64) * 5, scales, NumberFormat(7)),
        fake_quantize_weight(weight, scales, NumberFormat(7)),
    )


def test_gptq_rejects_inputs_with_nan():
    with pytest.raises(CompressError, match="expected finite inputs"):
        round_with_gptq(torch.ones(2, 3), torch.full((3, 3), float("nan")), torch.ones(2, 1), NumberFormat(7))


def test_gptq_handles_an_input_that_is_always_zero():
    weight, x = torch.randn(40, 64, generator=seeded()), correlated(500, 64)
    x[:, 3] = 0
    scales = compute_weight_scales(weight, NumberFormat(7))
    nearest, compensated = (
        fake_quantize_weight(weight, scales, NumberFormat(7)),
        round_with_gptq(weight, x.T @ x, scales, NumberFormat(7)),
    )
    errors = [float((x @ (each - weight).T).square().mean()) for each in (nearest, compensated)]
    assert errors[1] < 0.5 * errors[0]
    assert torch.equal(compensated[:, 3], nearest[:, 3])


def rounding_error(model: nn.Module, plain: nn.Module, batches: list[dict[str, torch.Tensor]]) -> float:
    with torch.no_grad():
        return sum(float((model(**b).logits - plain(**b).logits).square().mean()) for b in batches)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_gptq_beats_nearest_rounding_on_a_model_and_awq_is_at_most_5_percent_worse(family: str):
    plain, batches = build(family, intermediate_size=64).eval(), token_batches(8)
    errors = {}
    for method in ("nearest", "gptq", "awq"):
        model = copy.deepcopy(plain)
        if method == "awq":
            schemes = {n: resolve_scheme("int4-weights") for n, m in model.named_modules() if isinstance(m, nn.Linear)}
            apply_awq(model, find_folds(model, batches[0]), batches, schemes)
        prepare_quantized(model, resolve_scheme("int4-weights"))
        if method == "gptq":
            apply_gptq(model, batches)
        errors[method] = rounding_error(model, plain, batches)
        quantization = convert_quantized(model)
        assert rounding_error(model, plain, batches) == pytest.approx(errors[method], rel=1e-3), "scales weren't kept"
        assert all(
            quantized.scheme is None or quantized.number_format.largest in (7, 127)
            for quantized in quantization.values()
        )
    assert errors["gptq"] < errors["nearest"]
    assert errors["awq"] < 1.05 * errors["nearest"]


FOUND = {
    "llama": {"input_layernorm", "post_attention_layernorm", "self_attn.v_proj", "mlp.up_proj"},
    "gemma": {"input_layernorm", "post_attention_layernorm", "self_attn.v_proj", "mlp.up_proj"},
    "bert": {"attention.self.value"},
}


@pytest.mark.parametrize("family", list(FOUND))
def test_folded_scales_do_not_change_the_models_logits(family: str):
    model = build(family).eval() if family != "bert" else build_model("bert")
    batch = token_batches()[0]
    with torch.no_grad():
        expected = model(**batch).logits
    folds = find_folds(model, batch)
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).logits, expected, rtol=1e-4, atol=1e-5)
    assert {re.split(r"layers?\.\d+\.", fold.producer)[-1] for fold in folds} == FOUND[family]
    for fold in folds:
        inputs = model.get_submodule(fold.consumers[0]).weight.shape[1]
        apply_scales(model, fold, tie_scales(torch.rand(inputs, generator=seeded()) + 0.5, model, fold))
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).logits, expected, rtol=1e-3, atol=1e-4)


def test_folds_are_found_in_question_answering_models():
    model = build_model("bert", "ForQuestionAnswering", num_labels=2)
    producers = {re.split(r"layers?\.\d+\.", fold.producer)[-1] for fold in find_folds(model, token_batches()[0])}
    assert producers == FOUND["bert"] | {"output.LayerNorm"}


def test_only_one_factor_of_a_gated_product_absorbs_the_scales():
    model = build("llama", hidden_act="relu").eval()  # positive factors go through ReLU
    folds = find_folds(model, token_batches()[0])
    consumers = [fold.consumers for fold in folds]
    assert len(consumers) == len(set(consumers))
    assert any("down_proj" in name for names in consumers for name in names)


def test_layers_kept_in_float_need_not_divide_into_groups():
    model = build("llama", intermediate_size=80)
    config = QuantizeConfig(scheme="int4-weights", rounding="awq", float_layers="*.down_proj")
    names = quantize_model(model, config, token_batches())
    assert names
    assert not any(name.endswith("down_proj") for name in names)


def test_smoothing_reduces_the_error_caused_by_activation_outliers():
    model = build("llama").eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight[5] = 40.0
    plain, batches = copy.deepcopy(model), token_batches(6)
    errors = []
    for smooth in (False, True):
        model_copy = copy.deepcopy(plain)
        if smooth:
            apply_smoothquant(model_copy, find_folds(model_copy, batches[0]), batches)
            assert rounding_error(model_copy, plain, batches) < 1e-6, "scaling alone changed the model"
        prepare_quantized(model_copy, resolve_scheme("int8-static"))
        calibrate(model_copy, batches)
        errors.append(rounding_error(model_copy, plain, batches))
    assert errors[1] < 0.7 * errors[0]


def test_smooth_and_gptq_without_texts_are_rejected():
    model = build("llama").eval()
    with pytest.raises(CompressError, match="expected calibration texts for channel scales, found none"):
        apply_smoothquant(model, find_folds(model, token_batches()[0]), [])
    prepare_quantized(model, resolve_scheme("int4-weights"), keep=("*.down_proj",))
    with pytest.raises(CompressError, match="gptq: expected at least one calibration batch, found none"):
        apply_gptq(model, [])
    assert any(isinstance(module, QuantizedLinear) for module in model.modules())
    assert Fold("a", ("b",)).shift == 0
