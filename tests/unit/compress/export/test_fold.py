"""Tests that folded norms compute the same, in PyTorch and in exported files."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.export.common.fold import SPREAD, fold_norms
from compress.export.common.source import Source
from compress.export.common.targets import find_target
from compress.export.onnx.graph import OnnxModel
from compress.export.write import check_layers, write_targets
from compress.quantize.prepare import convert_quantized, prepare_quantized
from compress.quantize.schemes import SCHEMES
from distill.checkpoint.custom_models import load_model_folder, save_model_folder
from distill.checkpoint.norm_kinds import NONORM
from distill.student.build import build_student
from support.tiny_families import logits, model_of, padded_batch

ENCODERS = ("bert", "roberta", "electra", "electra-projected", "distilbert", "bert-words")
KINDS = ("nonorm", "batchnorm")


def trained(family: str, kind: str, spec: str = "layers=0,1,2") -> PreTrainedModel:
    """Returns a student whose norms are no longer those that it was built with."""
    student = build_student(model_of(family), f"{spec},norm={kind}")
    draw = torch.Generator().manual_seed(0)
    for name, tensor in student.base_model.state_dict().items():
        if "norm" in name.lower():
            tensor.mul_(0.8 + 0.4 * torch.rand(tensor.shape, generator=draw))
    return student


def assert_close(found: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    """Asserts equal logits within a share of the largest, and the same predictions."""
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ENCODERS)
def test_a_folded_student_computes_the_same_and_keeps_few_norms(family, kind, tmp_path):
    student = trained(family, kind)
    before = {name: value.clone() for name, value in student.state_dict().items()}
    folded = fold_norms(student)
    batch = padded_batch(student)
    assert_close(logits(folded, batch), logits(student, batch))
    assert all(torch.equal(value, before[name]) for name, value in student.state_dict().items())
    kinds = list(folded.config.norms.values())
    assert kinds[-1] == NONORM  # of the end of the stream
    assert kinds.count(NONORM) <= 2
    assert fold_norms(folded) is folded
    save_model_folder(folded, tmp_path)
    assert torch.equal(logits(load_model_folder(tmp_path), batch), logits(folded, batch))


@pytest.mark.parametrize("kind", KINDS)
def test_the_hidden_states_after_the_last_layer_are_those_of_the_student(kind):
    student = trained("bert", kind)
    batch = padded_batch(student)
    with torch.no_grad():
        found, expected = (model.base_model(**batch).last_hidden_state for model in (fold_norms(student), student))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("scale", [0.0, 1e-6])
def test_a_factor_far_from_the_others_stays_in_its_norm(scale):
    student = trained("bert", "nonorm")
    name = "encoder.layer.1.output.LayerNorm"
    with torch.no_grad():
        student.base_model.get_submodule(name).weight[3] = scale
    folded = fold_norms(student)
    assert folded.config.norms[name] == NONORM
    batch = padded_batch(student)
    assert_close(logits(folded, batch), logits(student, batch))
    weights = [layer.weight for layer in folded.modules() if isinstance(layer, nn.Linear)]
    largest = max(
        float(layer.weight.detach().abs().max()) for layer in student.modules() if isinstance(layer, nn.Linear)
    )
    assert all(weight.isfinite().all() and weight.abs().max() < largest * SPREAD**2 for weight in weights)


def test_mobilebert_with_batch_norms_becomes_its_stock_class():
    student = trained("bert", "batchnorm", "mobilebert")
    folded = fold_norms(student)
    assert type(folded).__name__ == "MobileBertForSequenceClassification"
    assert folded.config.normalization_type == "no_norm"
    batch = padded_batch(student)
    assert_close(logits(folded, batch), logits(student, batch))


@pytest.mark.parametrize("spec", ["layers=2", "mobilebert", "layers=2,norm=rmsnorm"])
def test_models_without_element_wise_norms_of_their_own_are_the_same_object(spec):
    student = build_student(model_of("bert"), spec)
    assert fold_norms(student) is student


@pytest.mark.slow
@pytest.mark.parametrize(("family", "kind"), [("bert", "batchnorm"), ("distilbert", "nonorm"), ("bert", "rmsnorm")])
def test_exported_files_compute_what_the_student_does(family, kind, tokenizer, tmp_path):
    student = trained(family, kind, "layers=2")
    folded = fold_norms(student)
    source = Source(folded, tokenizer, trained=student)
    write_targets(source, [find_target("onnx"), find_target("onnxruntime"), find_target("huggingface")], tmp_path)
    batch = {name: value.numpy() for name, value in padded_batch(student).items()}
    batch["token_type_ids"] = np.zeros_like(batch["input_ids"])
    expected = logits(student, padded_batch(student))
    for target in ("onnx", "onnxruntime"):
        assert_close(torch.from_numpy(OnnxModel(tmp_path / target, threads=1)(batch)), expected)
    assert torch.equal(logits(load_model_folder(tmp_path / "huggingface"), padded_batch(student)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_a_folded_student_are_deployed_as_int8(kind, tokenizer, tmp_path):
    student = fold_norms(trained("bert", kind, "layers=2"))
    batch = padded_batch(student)
    plain = logits(student, batch)
    prepare_quantized(student, SCHEMES["int8-dynamic"])
    source = Source(student, tokenizer, convert_quantized(student))
    inputs = {name: value.numpy() for name, value in batch.items()}
    inputs["token_type_ids"] = np.zeros_like(inputs["input_ids"])
    target = find_target("onnx-int8")
    write_targets(source, [target], tmp_path)
    assert check_layers(source, target, tmp_path, inputs) <= 1e-5
    exported_logits = torch.from_numpy(OnnxModel(tmp_path / "onnx-int8", threads=1)(inputs))
    reference = logits(source.reference, batch)
    assert (exported_logits - reference).abs().max() <= 0.02 * reference.abs().max()
    assert (exported_logits - plain).abs().max() <= 0.15 * plain.abs().max()
