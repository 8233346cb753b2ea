"""Tests LiteRT files: fixed-length signatures match the model on each unpadded text, or raise an error."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from compress.errors import CompressError, ExportError
from compress.export.common.huggingface import TorchModel
from compress.export.common.rows import Layer
from compress.export.common.source import Source
from compress.export.common.targets import ExportTarget
from compress.export.litert.integers import pack_integers, write_integers
from compress.export.litert.model import LITERT_FILE, LitertModel, list_signature_lengths
from compress.export.litert.tflite import ALIGNED, File, schema
from compress.export.onnx.nodes import Writer
from compress.export.write import check_layers, write_targets
from compress.quantize.prepare import convert_quantized, prepare_quantized
from compress.quantize.schemes import resolve_scheme
from distill.slicing import prune
from support.tiny_families import axes_of, model_of, random_shape
from support.tiny_models import build_model, word_tokenizer

SHORT, LONG = 16, 20  # tokens of the two signatures


def source_of(model: PreTrainedModel, longest: int = SHORT, scheme: str = "int8-dynamic") -> Source:
    prepare_quantized(model, resolve_scheme(scheme))
    tokenizer = word_tokenizer(model_max_length=longest)
    return Source(model.eval(), tokenizer, convert_quantized(model))


def batch(length: int, rows: int = 3) -> dict[str, np.ndarray]:
    """Returns a padded batch of texts of at most `length` tokens."""
    ids = np.random.default_rng(length).integers(5, 60, (rows, length))
    mask = (np.arange(length) < np.linspace(length, 3, rows).astype(int)[:, None]).astype(np.int64)
    return {"input_ids": ids * mask, "attention_mask": mask, "token_type_ids": mask * (ids % 2)}


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], tuple[Source, Path]]:
    """`export()` -> (a one-layer RoBERTa, the folder of its targets); the file has two signatures."""

    @cache
    def write() -> tuple[Source, Path]:
        source, folder = source_of(build_model("roberta", num_hidden_layers=1), LONG), tmp_path_factory.mktemp("litert")
        write_targets(source, [ExportTarget("litert", "int8")], folder)
        return source, folder

    return write


@pytest.mark.slow
def test_padding_up_to_a_signature_keeps_the_logits(export):
    source, folder = export()
    model = LitertModel(folder / "litert-int8", threads=1)
    assert model.program.lengths == [SHORT, LONG]
    for length in (3, SHORT, SHORT + 1, LONG):
        expected = source.runner(batch(length))
        assert np.abs(model(batch(length)) - expected).max() <= 0.02 * np.abs(expected).max()


def test_a_text_longer_than_every_signature_is_rejected(export):
    _, folder = export()
    model = LitertModel(folder / "litert-int8", threads=1)
    with pytest.raises(CompressError, match=f"expected texts of at most {LONG} tokens, found one of {LONG + 1}"):
        model(batch(LONG + 1))
    wide = {name: np.pad(value, ((0, 0), (0, 9))) for name, value in batch(LONG).items()}  # only the padding is longer
    assert np.array_equal(model(wide), model(batch(LONG)))


def test_signatures_share_aligned_weights(export):
    _, folder = export()
    program = (folder / "litert-int8" / LITERT_FILE).read_bytes()
    model = File(program).model
    shared = [
        {tensor.name: tensor.buffer for tensor in graph.tensors if b"layer.0" in tensor.name}
        for graph in model.subgraphs
    ]
    assert len(shared) == 2
    assert len(shared[0]) == 6
    assert shared[0] == shared[1]
    read = schema.Model.GetRootAs(program, 0)
    starts = [
        table.Vector(table.Offset(4))
        for table in (read.Buffers(i)._tab for i in range(read.BuffersLength()))
        if table.Offset(4)
    ]
    assert not [start for start in starts if start % ALIGNED], "kernels read numbers from where they may not"


@pytest.mark.slow
def test_each_token_keeps_its_logits_whatever_signature_its_text_fits(tmp_path):
    source = source_of(build_model("bert", "ForTokenClassification", num_hidden_layers=1), LONG)
    write_targets(source, [ExportTarget("litert", "int8")], tmp_path)
    model, inputs = LitertModel(tmp_path / "litert-int8", threads=1), batch(LONG)
    expected, found = (run(inputs)[inputs["attention_mask"] == 1] for run in (source.runner, model))
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= 0.02 * np.abs(expected).max()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["electra-projected", "distilbert"])
def test_consecutive_products_and_fused_activations_match_their_layers(family: str, tmp_path):
    """A converter may fold a product's bias into the product that follows, and fuse a ReLU with its product."""
    layers = {"n_layers": 1} if family == "distilbert" else {"num_hidden_layers": 1}
    source = source_of(build_model(family, **layers))
    write_targets(source, [ExportTarget("litert", "int8")], tmp_path)
    assert check_layers(source, ExportTarget("litert", "int8"), tmp_path, batch(12)) <= 1e-5


@pytest.mark.slow
def test_products_of_a_pruned_model_match_their_layers(tmp_path):
    axes = axes_of("bert")
    small = prune(model_of("bert"), axes, random_shape(axes, 2, ("heads", "ffn", "hidden"), (1, 2), largest=0.8))
    source = source_of(small)
    write_targets(source, [ExportTarget("litert", "int8")], tmp_path)
    assert check_layers(source, ExportTarget("litert", "int8"), tmp_path, batch(12)) <= 1e-5


@pytest.mark.slow
def test_a_quantized_layer_missing_from_the_file_is_rejected(tmp_path):
    source = source_of(build_model("bert", num_hidden_layers=1))
    write_targets(Source(source.model, source.tokenizer), [ExportTarget("litert")], tmp_path)
    expected = source.runner(batch(12))
    plain = TorchModel.of(source.model)(batch(12))
    assert np.abs(LitertModel(tmp_path / "litert", threads=1)(batch(12)) - plain).max() <= 1e-4
    assert np.abs(expected - plain).max() > 1e-4
    with torch.no_grad():
        source.model.classifier.weight.mul_(1.5)
    with pytest.raises(ExportError, match=r"no product with the weights of classifier \(1 of 8 layers that round\)"):
        write_integers((tmp_path / "litert" / LITERT_FILE).read_bytes(), source.layers, {})


def test_packing_of_4_bit_integers_matches_onnx_at_odd_sizes():
    for shape in ((1, 1), (3, 5), (2, 4)):
        integers = np.arange(-7, -7 + shape[0] * shape[1], dtype=np.int8).reshape(shape)
        layer = Layer(integers.astype(np.float32), integers, np.ones((shape[0], 1), np.float32), 4, "token", None)
        writer = Writer()
        assert pack_integers(layer).tobytes() == writer.constants[writer.add_int4_constant("w", integers)].raw_data


def test_signature_lengths_double_from_16_up_to_the_model_length_or_512():
    assert list_signature_lengths(64) == [16, 32, 64]
    assert list_signature_lengths(100) == [16, 32, 64, 100]
    assert list_signature_lengths(8) == [8]
    assert list_signature_lengths(8192) == [16, 32, 64, 128, 256, 512]


def test_a_missing_library_is_reported_with_its_install_command(export, tmp_path, monkeypatch):
    source, folder = export()
    monkeypatch.setattr("compress.export.common.targets.find_spec", lambda name: None)
    with pytest.raises(CompressError, match=r"pip install -e '.\[litert\]'"):
        write_targets(source, [ExportTarget("litert", "int8")], tmp_path)
    with pytest.raises(CompressError, match=r"pip install -e '.\[litert\]'"):
        LitertModel(folder / "litert-int8", threads=1)
