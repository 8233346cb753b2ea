"""Tests quantized layers, calibration, and converting and restoring models."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from compress.errors import CompressError
from compress.layer_inputs import drop_padding
from compress.quantize.calibration import InputStatistics, calibrate, compute_rounding_error
from compress.quantize.config import QuantizeConfig
from compress.quantize.layers import QuantizedEmbedding, QuantizedLinear
from compress.quantize.model import quantize_model
from compress.quantize.prepare import (
    convert_quantized,
    find_lowest_precision,
    learn_scales,
    prepare_quantized,
    requantize,
)
from compress.quantize.schemes import SCHEMES, resolve_scheme
from compress.quantize.store import QUANTIZATION_FILE, load_quantization, save_quantization
from distill.train.config import TrainConfig
from distill.train.optimizer import build_optimizer
from support.tiny_families import build
from support.tiny_models import build_model

NAMES = list(SCHEMES)


def seeded(number: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(number)


# --- calibration


def test_mse_ranges_have_less_error_than_minmax_ranges():
    values = torch.cat([torch.randn(20000, generator=seeded()), torch.tensor([40.0, -40.0])])
    seen = InputStatistics(0)
    for part in values.split(3000):
        seen.update(part)
    errors = {
        method: float(compute_rounding_error(values, *seen.compute_range(method)))
        for method in ("minmax", "percentile", "mse")
    }
    assert seen.compute_range("minmax") == (-40.0, 40.0)
    assert errors["mse"] < errors["minmax"]
    assert 3 < float(seen.compute_range("percentile")[1]) < 5


def test_observed_values_are_a_uniform_sample_of_the_stream():
    seen = InputStatistics(1)
    for part in torch.arange(200_000.0).split(7000):
        seen.update(part)
    assert len(seen.values) == 2**16
    assert float(seen.values.mean()) == pytest.approx(100_000, rel=0.02)


def test_padding_does_not_change_a_calibrated_range(token_batch):
    model = build_model("bert")
    prepare_quantized(model, resolve_scheme("int8-static"))
    assert calibrate(model, [token_batch]) == 6
    whole = model.bert.encoder.layer[1].intermediate.dense.grid.scale.clone()
    rows = [
        {name: value[i : i + 1, : int(token_batch["attention_mask"][i].sum())] for name, value in token_batch.items()}
        for i in range(6)
    ]
    assert calibrate(model, rows) == 6
    torch.testing.assert_close(model.bert.encoder.layer[1].intermediate.dense.grid.scale, whole)


def test_pooled_values_are_not_masked_as_tokens():
    pooled, mask = torch.randn(2, 4, generator=seeded()), torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]]).bool()
    assert torch.equal(drop_padding(pooled, mask), pooled), "as wide as the texts are long"
    assert drop_padding(torch.randn(2, 4, 3, generator=seeded()), mask).shape == (4, 3)


def test_queries_keys_and_values_share_one_input_grid(token_batch):
    model = build_model("bert")
    prepare_quantized(model, resolve_scheme("int8-static"))
    calibrate(model, [token_batch, token_batch])
    attention = model.bert.encoder.layer[0].attention
    assert attention.self.query.grid is attention.self.key.grid is attention.self.value.grid
    assert attention.output.dense.grid is not attention.self.query.grid


def test_calibration_that_reaches_a_layer_with_no_batch_is_rejected():
    class OneOfTwo(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.spare = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    model = OneOfTwo()
    prepare_quantized(model, resolve_scheme("int8-static"))
    with pytest.raises(CompressError, match="layer 'spare': expected calibration batches that reach it, found none"):
        calibrate(model, [{"x": torch.randn(4, 8, generator=seeded())}])


def test_calibration_without_texts_or_with_infinite_values_is_rejected(token_batch):
    model = build_model("bert")
    prepare_quantized(model, resolve_scheme("int8-static"))
    with pytest.raises(CompressError, match="expected at least one text, found none"):
        calibrate(model, [])
    with torch.no_grad():
        model.bert.embeddings.LayerNorm.bias.fill_(float("inf"))
    with pytest.raises(CompressError, match="expected finite inputs of bert.*found values from .* to inf"):
        calibrate(model, [token_batch])


# --- models


def prepared(name: str, batch: dict, family: str = "bert", **changes: int) -> nn.Module:
    model = build(family, **changes) if family != "bert" else build_model("bert")
    prepare_quantized(model, resolve_scheme(name), keep=("*.score",))
    calibrate(model, [batch])
    return model


@pytest.mark.parametrize("name", NAMES)
def test_a_converted_and_restored_model_computes_the_prepared_models_logits(name: str, token_batch, tmp_path):
    model = prepared(name, token_batch)
    with torch.no_grad():
        trained = model(**token_batch).logits
    quantization = convert_quantized(model)
    assert not any(isinstance(layer, QuantizedLinear | QuantizedEmbedding) for layer in model.modules())
    assert set(model.state_dict()) == set(build_model("bert").state_dict())
    save_quantization(quantization, tmp_path)
    again = load_quantization(tmp_path)
    restored = copy.deepcopy(model)
    requantize(restored, again)
    with torch.no_grad():
        torch.testing.assert_close(restored(**token_batch).logits, trained, rtol=1e-5, atol=1e-5)
        if resolve_scheme(name).input_scales == "float":
            torch.testing.assert_close(model(**token_batch).logits, trained, rtol=1e-5, atol=1e-5)
    for layer, quantized in again.items():
        weight = model.get_submodule(layer).weight.detach()
        size = weight.shape[1] // quantized.scales.shape[1]
        numbers = quantized.quantize(weight).float()
        assert torch.allclose(numbers * quantized.scales.repeat_interleave(size, dim=1), weight, rtol=1e-6)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma", "modernbert", "distilbert"])
def test_converted_models_of_each_family_restore_their_logits(family: str, token_batch):
    token_batch["input_ids"] %= 60
    model = prepared("int8-static", token_batch, family)
    with torch.no_grad():
        trained = model(**token_batch).logits
    quantization = convert_quantized(model)
    requantize(model, quantization)
    with torch.no_grad():
        torch.testing.assert_close(model(**token_batch).logits, trained, rtol=1e-5, atol=1e-5)


def test_a_tied_head_and_embedding_share_8_bit_scales(token_batch):
    token_batch["input_ids"] %= 60
    model = prepared("int4-weights", token_batch, "qwen2", intermediate_size=64)
    assert model.lm_head.scheme.bits == 8
    quantization = convert_quantized(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(quantization["lm_head"].scales, quantization["model.embed_tokens"].scales)


@pytest.mark.parametrize("name", NAMES)
def test_a_prepared_model_can_be_trained(name: str, token_batch):
    model = prepared(name, token_batch)
    goal = torch.randint(0, 5, (6,), generator=seeded())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(40):
        loss = F.cross_entropy(model(**token_batch).logits, goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert all(p.grad is not None for p in model.parameters())


def test_learned_input_scales_are_updated_by_the_optimizer(token_batch):
    model = build_model("bert")
    prepare_quantized(model, resolve_scheme("int8-static"))
    calibrate(model, [token_batch], learned=True)
    before = {n: p.detach().clone() for n, p in model.named_parameters() if n.endswith("grid.scale")}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    F.cross_entropy(model(**token_batch).logits, torch.zeros(6, dtype=torch.int64)).backward()
    optimizer.step()
    assert len(before) == 4 * 4 + 2
    assert all(not torch.equal(p, before[n]) for n, p in model.named_parameters() if n in before)


@pytest.mark.parametrize("keep", ["lm_head", "*.embed_tokens"])
def test_keeping_one_tied_layer_in_float_keeps_both(keep: str, token_batch):
    token_batch["input_ids"] %= 60
    model = build("llama", tie_word_embeddings=True)
    before = model.lm_head.weight.detach().clone()
    names = prepare_quantized(model, resolve_scheme("int8-weights"), keep=(keep,))
    assert not {"lm_head", "model.embed_tokens"} & set(names)
    convert_quantized(model)
    assert torch.equal(model.lm_head.weight, before)


def test_embedding_subclasses_are_left_in_float(token_batch):
    class Scaled(nn.Embedding):
        def forward(self, input):  # noqa: A002
            return 8 * super().forward(input)

    model = build_model("bert")
    table = Scaled(*model.bert.embeddings.word_embeddings.weight.shape)
    table.weight = model.bert.embeddings.word_embeddings.weight
    model.bert.embeddings.word_embeddings = table
    names = prepare_quantized(model, resolve_scheme("int8-weights"))
    assert "bert.embeddings.position_embeddings" in names
    assert "bert.embeddings.word_embeddings" not in names
    assert model.bert.embeddings.word_embeddings is table


def test_weight_scales_follow_the_device_and_stay_out_of_the_state_dict(token_batch):
    model = prepared("int4-weights", token_batch)
    learn_scales(model)
    layer = model.to("meta").bert.encoder.layer[0].output.dense
    assert layer.scales.device.type == layer.stretch.device.type == "meta"
    assert not any("scales" in name for name in model.state_dict()), "a checkpoint has them twice"


@pytest.mark.parametrize("name", ["int8-static", "int4-weights"])
def test_learned_weight_scales_train_without_decay_and_survive_conversion(name: str, token_batch):
    model = prepared(name, token_batch).eval()
    learn_scales(model)
    groups = build_optimizer(model, [], TrainConfig(learning_rate=1e-2, weight_decay=0.5)).param_groups
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    stretches = [p for n, p in model.named_parameters() if n.endswith("stretch")]
    assert len(stretches) == 4 * 6 + 2
    assert not any(id(p) in decayed for p in stretches), "weight decay would shrink every scale"
    optimizer = torch.optim.Adam(stretches, lr=1e-2)
    goal = torch.randint(0, 5, (6,), generator=seeded())
    losses = []
    for _ in range(60):
        loss = F.cross_entropy(model(**token_batch).logits, goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert min(losses[-10:]) < 0.95 * losses[0], "scales alone learn"
    with torch.no_grad():
        trained = model(**token_batch).logits
    quantization = convert_quantized(model)
    assert not any(name.endswith("stretch") for name in model.state_dict())
    requantize(model, quantization)
    with torch.no_grad():
        torch.testing.assert_close(model(**token_batch).logits, trained, rtol=1e-5, atol=1e-5)


# --- invalid models and settings


def test_reduced_weights_do_not_saturate_16_bit_products(token_batch):
    for name in ("int8-static", "int8-dynamic"):
        model = build_model("bert")
        quantize_model(model, QuantizeConfig(scheme=name, reduce_range=True), [token_batch])
        quantization = convert_quantized(model)
        weight = quantization["bert.encoder.layer.0.intermediate.dense"].quantize(
            model.bert.encoder.layer[0].intermediate.dense.weight
        )
        assert int(weight.abs().max()) == 63
        assert 2 * 255 * int(weight.abs().max()) < 2**15
        assert find_lowest_precision(quantization) == "int8"
    with pytest.raises(CompressError, match="quantize.reduce_range: expected a scheme with integer products"):
        QuantizeConfig(scheme="int8-weights", reduce_range=True)


def test_settings_that_do_not_apply_to_the_scheme_or_method_are_rejected():
    with pytest.raises(CompressError, match="quantize.ranges mse: expected scheme int8-static, found int4-weights"):
        QuantizeConfig(scheme="int4-weights", ranges="mse")
    with pytest.raises(CompressError, match="quantize.learned_scales True: expected method qat with it, found ptq"):
        QuantizeConfig(scheme="int8", learned_scales=True, method="ptq")
    with pytest.raises(CompressError, match="quantize.epochs 9: expected method qat with it, found ptq"):
        QuantizeConfig(scheme="int8", epochs=9, method="ptq")


def test_a_pattern_of_float_layers_that_matches_none_is_rejected(token_batch):
    config = QuantizeConfig(scheme="int8-static", float_layers="*pooler*,clasifier")
    with pytest.raises(CompressError, match="float_layers: expected patterns that match a layer, .* found 'clasifier'"):
        quantize_model(build_model("bert"), config, [token_batch])


def test_an_already_quantized_model_is_rejected(token_batch):
    model = prepared("int8-weights", token_batch)
    with pytest.raises(CompressError, match="expected plain layers, found quantized layer"):
        prepare_quantized(model, resolve_scheme("int8-weights"))
    plain = build_model("bert")
    plain.config.quantization_config = {"quant_method": "torchao"}
    with pytest.raises(CompressError, match="expected a float checkpoint"):
        prepare_quantized(plain, resolve_scheme("int8-weights"))


def test_weights_with_nan_are_rejected():
    model = build_model("bert")
    with torch.no_grad():
        model.bert.encoder.layer[2].output.dense.weight[3, 4] = float("nan")
    with pytest.raises(CompressError, match=r"finite values in bert.encoder.layer.2.output.dense.weight, found 1"):
        prepare_quantized(model, resolve_scheme("int8-weights"))


def test_converting_without_ranges_or_rounding_layers_is_rejected(token_batch):
    model = build_model("bert")
    prepare_quantized(model, resolve_scheme("int8-static"))
    with pytest.raises(CompressError, match="found no input range"):
        convert_quantized(model)
    with pytest.raises(CompressError, match="found no quantized layer in BertForSequenceClassification"):
        convert_quantized(build_model("bert"))


def test_families_with_conv1d_layers_are_rejected():
    with pytest.raises(CompressError, match="expected linear layers, found Conv1D"):
        prepare_quantized(build("gpt2"), resolve_scheme("int8-weights"))


def test_saving_the_same_quantization_twice_gives_the_same_bytes(token_batch, tmp_path):
    quantization = convert_quantized(prepared("int8-static", token_batch))
    contents = set()
    for _ in range(16):  # the library writes the metadata in random order
        save_quantization(quantization, tmp_path)
        contents.add((tmp_path / QUANTIZATION_FILE).read_bytes())
    assert len(contents) == 1
    assert load_quantization(tmp_path).keys() == quantization.keys()


def test_rounding_of_another_model_and_unquantized_checkpoints_are_rejected(token_batch, tmp_path):
    quantization = convert_quantized(prepared("int8-weights", token_batch))
    with pytest.raises(CompressError, match="belong to another model"):
        requantize(build("llama"), quantization)
    with pytest.raises(CompressError, match="expected a quantized checkpoint"):
        load_quantization(tmp_path)


def test_an_unknown_scheme_is_rejected():
    with pytest.raises(CompressError, match="expected one of int8-static.*found 'int3'"):
        resolve_scheme("int3")
