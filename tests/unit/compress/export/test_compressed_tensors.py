"""Tests decoders exported as compressed-tensors checkpoints and loaded by stock transformers classes."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from compress.errors import ExportError
from compress.export.common.source import Source
from compress.export.common.targets import FORMATS, ExportTarget, find_target
from compress.export.write import check_layers, write_targets
from compress.quantize.calibration import calibrate
from compress.quantize.prepare import convert_quantized, find_lowest_precision, prepare_quantized
from compress.quantize.schemes import SCHEMES, resolve_scheme
from support.tiny_families import build
from support.tiny_models import build_model, word_tokenizer

IDS = torch.randint(3, 60, (3, 9), generator=torch.Generator().manual_seed(3))
BATCH = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
WIDE = {"hidden_size": 64, "intermediate_size": 96}  # groups of 32 divide them


def written(model: PreTrainedModel, folder: Path, scheme: object, keep: tuple[str, ...] = ()) -> tuple[Source, Path]:
    prepare_quantized(model, scheme, keep=keep)
    calibrate(model, [BATCH])
    source = Source(model.eval(), word_tokenizer(), convert_quantized(model))
    assert source.quantization is not None
    target = ExportTarget("compressed-tensors", find_lowest_precision(source.quantization))
    write_targets(source, [target], folder)
    return source, folder / str(target)


def difference(source: Source, folder: Path) -> float:
    """Largest relative difference between the logits of a stock class that loads the folder and the reference model."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        found, expected = model(**BATCH).logits, source.reference(**BATCH).logits
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("scheme", [each for each in SCHEMES if each not in FORMATS["compressed-tensors"].unsupported])
def test_a_stock_decoder_computes_the_models_logits_from_quantized_weights(scheme: str, tmp_path):
    source, folder = written(build("llama", **WIDE), tmp_path, resolve_scheme(scheme))
    assert difference(source, folder) <= 1e-6
    stored = load_file(folder / "model.safetensors")
    kinds = {value.dtype for name, value in stored.items() if "q_proj" in name and "scale" not in name}
    assert not kinds & {torch.float32, torch.bfloat16}


@pytest.mark.parametrize("scheme", ["int8-dynamic", "int4-dynamic"])
def test_a_pooler_whose_inputs_stay_in_float_is_rejected(scheme: str, tmp_path):
    model = build_model("bert", num_hidden_layers=1, **WIDE)
    source, folder = written(model, tmp_path, resolve_scheme(scheme))
    inputs = {name: value.numpy() for name, value in BATCH.items()} | {"token_type_ids": np.zeros_like(IDS.numpy())}
    with pytest.raises(ExportError, match="pooler.dense has other outputs than in training"):
        check_layers(source, find_target(folder.name), tmp_path, inputs)


def test_a_tied_head_is_untied_and_stored_in_int8(tmp_path):
    source, folder = written(build("qwen2", **WIDE), tmp_path, resolve_scheme("int8-dynamic"))
    assert difference(source, folder) <= 1e-6
    assert load_file(folder / "model.safetensors")["lm_head.weight"].dtype == torch.int8
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False


def test_layers_of_several_schemes_get_separate_config_groups(tmp_path):
    model = build("llama", **WIDE)
    layers = [name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)]
    widened = {name: resolve_scheme("int8-weights" if "down_proj" in name else "int4-weights") for name in layers}
    source, folder = written(model, tmp_path, widened)
    assert difference(source, folder) <= 1e-6
    groups = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"]
    assert sorted(group["weights"]["num_bits"] for group in groups.values()) == [4, 8]


def test_layers_kept_in_float_are_stored_in_float32(tmp_path):
    source, folder = written(build("llama", **WIDE), tmp_path, resolve_scheme("int8-static"), ("*.0.*", "lm_head"))
    assert difference(source, folder) <= 1e-6
    stored = load_file(folder / "model.safetensors")
    assert stored["model.layers.0.mlp.up_proj.weight"].dtype == stored["lm_head.weight"].dtype == torch.float32
    assert stored["model.layers.1.mlp.up_proj.weight"].dtype == torch.int8
