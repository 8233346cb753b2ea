"""Tests ranking layers by quantization sensitivity and quantizing the most sensitive ones by a wider scheme."""

import copy

import pytest
import torch

from compress.errors import CompressError
from compress.quantize.config import QuantizeConfig
from compress.quantize.layers import QuantizedEmbedding, QuantizedLinear, find_quantized_layers
from compress.quantize.model import quantize_model
from compress.quantize.prepare import convert_quantized, requantize
from compress.quantize.sensitivity import group_layers, measure_sensitivities, widen_most_sensitive
from support.tiny_families import build
from support.tiny_models import build_model

SIZES = {"hidden_size": 64, "intermediate_size": 96}
SENSITIVE_LAYER = "bert.encoder.layer.2.output.dense"


@pytest.fixture
def batch(token_batch) -> dict[str, torch.Tensor]:
    return token_batch


def sensitive_model() -> torch.nn.Module:
    """A model with a layer in which one large weight per group leaves the others almost no grid steps."""
    model = build_model("bert", **SIZES)
    with torch.no_grad():
        model.get_submodule(SENSITIVE_LAYER).weight[:, ::32] *= 30
        # GELU then makes the inputs with large weights zero.
        model.get_submodule("bert.encoder.layer.2.intermediate.dense").bias[::32] = -50.0
    return model


@pytest.fixture
def rounded(batch):
    """(prepared model, divergence() of its logits from those of the float model)"""
    plain = sensitive_model()
    with torch.no_grad():
        expected = plain(**batch).logits
    model = copy.deepcopy(plain)
    quantize_model(model, QuantizeConfig(scheme="int4-dynamic"), [batch])

    def divergence() -> float:
        with torch.no_grad():
            return float((model(**batch).logits - expected).square().mean())

    return model, divergence


def test_the_most_sensitive_layer_ranks_first(rounded, batch):
    model, divergence = rounded
    before = divergence()
    ranked = measure_sensitivities(model, divergence, batch)
    assert ranked[0].layers == (SENSITIVE_LAYER,)
    assert ranked[0].divergence > 2 * ranked[1].divergence
    assert divergence() == before, "the model was changed by looking at it"
    together = [group.layers for group in ranked if len(group.layers) == 3]
    assert len(together) == 4, "queries, keys and values are joined when they are deployed"
    assert sum(len(group.layers) for group in ranked) == len(find_quantized_layers(model))


def test_only_as_many_layers_are_widened_as_the_score_requires(rounded, batch):
    model, divergence = rounded
    ranked = measure_sensitivities(model, divergence, batch)
    everything = divergence()
    names, score = widen_most_sensitive(model, ranked, lambda: -divergence(), -0.8 * everything)
    assert names == [SENSITIVE_LAYER]
    assert score == pytest.approx(-divergence())
    layer = model.get_submodule(SENSITIVE_LAYER)
    assert isinstance(layer, QuantizedLinear)
    assert layer.scheme.name == "int8-dynamic"
    with torch.no_grad():
        expected = model(**batch).logits
    quantization = convert_quantized(model)
    assert quantization[SENSITIVE_LAYER].scheme.bits == 8
    assert sum(r.scheme.bits == 4 for r in quantization.values() if r.scheme is not None) == 4 * 6 + 2 - 1
    requantize(model, quantization)
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).logits, expected, rtol=1e-4, atol=1e-5)


def test_layers_at_8_bits_are_widened_to_float(batch):
    model = sensitive_model()
    quantize_model(model, QuantizeConfig(scheme="int8"), [batch])
    ranked = measure_sensitivities(
        model, lambda: float(sum(layer.fake_quant_enabled for layer in find_quantized_layers(model).values())), batch
    )
    names, _ = widen_most_sensitive(
        model, ranked, lambda: -float(find_quantized_layers(model)[SENSITIVE_LAYER].fake_quant_enabled), 0.0
    )
    assert SENSITIVE_LAYER in names
    assert not isinstance(model.get_submodule(SENSITIVE_LAYER), QuantizedLinear | QuantizedEmbedding)


def test_an_unreachable_score_is_rejected(rounded, batch):
    model, divergence = rounded
    ranked = measure_sensitivities(model, divergence, batch)
    with pytest.raises(CompressError, match=r"expected a validation score of 2.0000 .*, found 0.5000 at best"):
        widen_most_sensitive(model, ranked, lambda: 0.5, 2.0)


def test_a_tied_head_and_embedding_are_in_one_group(batch):
    model = build("bert-words")
    quantize_model(model, QuantizeConfig(scheme="int4-weights", float_layers="*.2.*"), [batch])
    layers = find_quantized_layers(model)
    groups = group_layers(model, layers, batch)
    table, head = "bert.embeddings.word_embeddings", "cls.predictions.decoder"
    assert (table, head) in groups
    assert sorted(name for group in groups for name in group) == sorted(layers), "each is in one group"


def test_calibrating_on_one_text_is_rejected(batch):
    one = {name: value[:1] for name, value in batch.items()}
    with pytest.raises(CompressError, match="expected at least 2 texts to calibrate on, found 1"):
        quantize_model(sensitive_model(), QuantizeConfig(scheme="int8"), [one])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_score_share": 1.5}, "quantize.min_score_share: expected a number from 0 to 1"),
        ({"smoothquant": -0.1}, "quantize.smoothquant: expected a number from 0 to 1"),
        ({"scheme": "int5"}, "quantize.scheme: expected one of"),
        ({"samples": 0}, "quantize.samples: expected at least 1"),
    ],
)
def test_invalid_settings_are_rejected(settings: dict, message: str):
    with pytest.raises(CompressError, match=message):
        QuantizeConfig(**({"scheme": "int8"} | settings))
