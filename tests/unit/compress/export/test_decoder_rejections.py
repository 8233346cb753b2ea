"""Tests that models that can't be exported as decoders, files of other models, and invalid prompts are rejected."""

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import transformers
from transformers import PreTrainedModel

from compress.errors import CompressError, ExportError
from compress.export.onnx.decoder import export_decoder, verify_decoder
from compress.export.onnx.generate import OnnxDecoder
from compress.export.onnx.graph import ONNX_FILE
from support.tiny_models import build_model
from unit.compress.export.test_decoder_export import BLOCKS, IDS, PROMPTS, SIZES, WORDS, build, word_tokenizer

DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


def model_of(name: str, **settings: object) -> PreTrainedModel:
    kind = getattr(transformers, name)
    return kind(kind.config_class(**(SIZES | IDS | {"intermediate_size": 40} | settings))).eval()


def model_with_weight(value: float) -> PreTrainedModel:
    model = build("qwen2")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = value
    return model


REJECTED = {
    "an encoder": (lambda: build_model("bert", "ForMaskedLM"), "BertForMaskedLM .* isn't a decoder with a head"),
    "a classifier": (lambda: model_of("LlamaForSequenceClassification"), "isn't a decoder with a head"),
    "an encoder with a decoder": (
        lambda: model_of("T5ForConditionalGeneration", d_model=32, d_kv=8),
        "isn't a decoder",
    ),
    "an encoder that calls itself one": (lambda: build_model("bert", "LMHeadModel"), "reads tokens that come later"),
    "states": (lambda: model_of("MambaForCausalLM", state_size=4), "keep LinearAttentionLayer between tokens"),
    "no positions": (lambda: model_of("BloomForCausalLM"), "it takes no positions"),
    "angles that change": (
        lambda: model_of("LlamaForCausalLM", rope_parameters=DYNAMIC_ROPE),
        r"\(dynamic\) change with",
    ),
    "half floats": (lambda: build("qwen2").half(), "expected weights in float32, found torch.float16"),
    "not a number": (lambda: model_with_weight(torch.nan), "layers.1.mlp.up_proj.weight and 0 other weights hold NaN"),
    "infinity": (lambda: model_with_weight(-torch.inf), "layers.1.mlp.up_proj.weight and 0 other weights hold NaN"),
}


@pytest.mark.parametrize("case", REJECTED)
def test_a_model_that_cannot_be_exported_as_a_decoder_is_rejected_and_nothing_is_written(case: str, tmp_path: Path):
    make, reason = REJECTED[case]
    with pytest.raises(ExportError, match=reason):
        export_decoder(make(), word_tokenizer(), tmp_path / "onnx")
    assert not (tmp_path / "onnx").exists()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpt2")
    export_decoder(build("gpt2"), word_tokenizer(), path)
    return path


def copy_with_changed_bias(folder: Path, target: Path, value: float, index: int) -> Path:
    """Returns a copy of the folder in which `value` is added to one element of the final norm's bias."""
    shutil.copytree(folder, target)
    graph = onnx.load(folder / ONNX_FILE)
    (bias,) = (each for each in graph.graph.initializer if each.name.endswith("ln_f.bias"))
    numbers = onnx.numpy_helper.to_array(bias).copy()
    numbers[index] += value
    bias.CopyFrom(onnx.numpy_helper.from_array(numbers, bias.name))
    onnx.save(graph, target / ONNX_FILE)
    return target


@pytest.mark.slow
def test_the_proof_rejects_files_of_another_model_or_with_changed_weights(folder: Path, tmp_path: Path):
    model = build("gpt2")
    assert verify_decoder(model, folder, PROMPTS, BLOCKS, new_tokens=10).max_difference < 1e-4
    with pytest.raises(ExportError, match="generates other tokens than the model: after prompt 0 .* from token 2 on"):
        verify_decoder(build("gpt2", scale_attn_weights=False), folder, PROMPTS, BLOCKS, new_tokens=10)
    with pytest.raises(ExportError, match="largest difference .*e-02, expected at most 1e-03"):
        verify_decoder(model, copy_with_changed_bias(folder, tmp_path / "a", 0.3, 4), PROMPTS[:1], BLOCKS, new_tokens=1)
    with pytest.raises(ExportError, match="other tokens|largest difference nan"):
        verify_decoder(
            model, copy_with_changed_bias(folder, tmp_path / "b", np.nan, 4), PROMPTS[:1], BLOCKS, new_tokens=1
        )


def test_the_proof_ignores_the_checkpoints_generation_settings(folder: Path):
    model = build("gpt2")
    model.generation_config.repetition_penalty = 3.0
    model.generation_config.do_sample = True
    assert verify_decoder(model, folder, PROMPTS[:1], BLOCKS[:1], new_tokens=10).tokens == 10
    assert model.generation_config.repetition_penalty == 3.0


@pytest.mark.parametrize(
    ("prompts", "settings", "reason"),
    [
        ([], {}, "found 0 prompts"),
        ([[3]], {"new_tokens": 0}, "0 tokens"),
        ([[3]], {"temperature": -1.0}, "a temperature of 0 or more"),
        ([[3], []], {}, "prompt 1 has no token"),
        ([[3], [4, WORDS]], {}, f"prompt 1: expected ids from 0 to {WORDS - 1}, found 4 to {WORDS}"),
        ([[3, -1]], {}, "found -1 to 3"),
        ([[3] * 100, [4]], {"new_tokens": 61}, "61 new tokens are 161, and the model has 160 positions"),
    ],
)
def test_invalid_prompts_and_settings_are_rejected(folder: Path, prompts, settings, reason):
    with pytest.raises(CompressError, match=reason):
        OnnxDecoder(folder, threads=1).generate(prompts, **({"new_tokens": 5} | settings))


def test_generation_can_use_the_last_position(folder: Path):
    (written,) = OnnxDecoder(folder, threads=1).generate([[3] * 100], 60)
    assert len(written) == 60
