"""Files of students without attention compute what the student does, for rows of any number and length."""

import copy
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from compress.errors import ExportError
from compress.export.arrays.reader import Reader
from compress.export.common.source import Source
from compress.export.common.targets import find_target
from compress.export.onnx.graph import OnnxModel
from compress.export.runtimes import open_export
from compress.export.write import check_layers, write_targets
from compress.quantize.calibration import calibrate
from compress.quantize.prepare import convert_quantized, prepare_quantized
from compress.quantize.schemes import resolve_scheme
from distill.models.sentence_encoder import PooledModel
from distill.student.build import build_student
from support.tiny_models import LABELS, VOCABULARY, build_model, make_rows, saved


@pytest.mark.parametrize("spec", [
    "static,ngrams=64,pooling=weighted+max",
    pytest.param("cnn,layers=2", marks=pytest.mark.slow),
    pytest.param("gru,hidden=16,layers=2", marks=pytest.mark.slow),
])  # fmt: skip
def test_an_onnx_file_has_the_logits_of_its_student(spec, tokenizer, tmp_path):
    student = build_student(build_model("bert"), f"{spec},embeddings=8", tokenizer=tokenizer).eval()
    write_targets(Source(student, tokenizer), [find_target("onnxruntime")], tmp_path)
    onnx = OnnxModel(tmp_path / "onnxruntime", threads=1)
    for lengths in ([1], [7], [3, 9, 5]):
        mask = torch.tensor([[1] * each + [0] * (max(lengths) - each) for each in lengths])
        ids = torch.randint(5, 60, mask.shape, generator=torch.Generator().manual_seed(len(lengths))) * mask
        with torch.no_grad():
            expected = student(input_ids=ids, attention_mask=mask).logits.numpy()
        found = onnx({name: value.numpy() for name, value in (("input_ids", ids), ("attention_mask", mask))})
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spec", ["static,ngrams=64", "gru,hidden=16"])
def test_onnx_runtimes_own_int8_gives_each_row_of_a_table_its_own_scale(spec, tokenizer, tmp_path):
    student = build_student(build_model("bert"), f"{spec},embeddings=32", tokenizer=tokenizer).eval()
    batch = to_arrays(draw_batch(9, 4, 2, 9))
    largest = next(number for number in range(5, 60) if number not in batch["input_ids"])
    with torch.no_grad():
        student.vectors.words.weight[largest] *= 1000  # with one scale for the table, all other rows would become 0
        student.classifier.weight *= 20
    targets = [find_target(each) for each in ("onnxruntime", "onnxruntime-int8")]
    write_targets(Source(student, tokenizer), targets, tmp_path)
    expected, found = (OnnxModel(tmp_path / str(target), threads=1)(batch) for target in targets)
    assert np.abs(found - expected).max() < 0.05 * expected.std()
    graph = onnx.load(str(tmp_path / "onnxruntime-int8" / "model.onnx")).graph
    tables = [each for each in graph.initializer if list(each.dims) == [len(VOCABULARY), 32]]
    assert [each.data_type for each in tables] == [onnx.TensorProto.INT8]


READ = """\
import sys
from reader import Reader
assert not {"torch", "transformers", "onnxruntime"} & {*sys.modules}
print(*Reader(".").classify(["bad", "good"])[1][1])
"""
ARRAYS = (
    "static,ngrams=64,pooling=weighted+max",
    "static,pooling=mean+order,positions=4",
    "cnn,layers=2,pooling=weighted",
    "cnn,kernel=4",
    "gru,hidden=16,layers=2",
)


@pytest.mark.parametrize("head", ["ForSequenceClassification", "ForTokenClassification", "pair"])
@pytest.mark.parametrize("spec", ARRAYS)
def test_numpy_alone_computes_the_logits_of_a_student(spec, head, tokenizer, tmp_path):
    if head == "ForTokenClassification" and spec.startswith("static"):
        pytest.skip("a static student tags no tokens")
    teacher = build_model("bert", "ForSequenceClassification" if head == "pair" else head)
    pair = head == "pair"
    student = build_student(teacher, f"{spec},embeddings=8", tokenizer=tokenizer, pair=pair).eval()
    if student.vectors.ngrams is not None:
        torch.nn.init.normal_(student.vectors.ngrams.weight)
    write_targets(Source(student, tokenizer), [find_target("numpy")], tmp_path)
    reader = open_export("numpy", tmp_path / "numpy", 1)
    for lengths in ([2], [7], [3, 9, 5]):
        mask = torch.tensor([[1] * each + [0] * (max(lengths) - each) for each in lengths])
        ids = torch.randint(5, 60, mask.shape, generator=torch.Generator().manual_seed(len(lengths))) * mask
        types = (torch.arange(ids.shape[1]) >= 2).long().expand_as(ids)
        with torch.no_grad():
            expected = student(input_ids=ids, attention_mask=mask, token_type_ids=types).logits.numpy()
        found = reader({name: value.numpy() for name, value in zip(reader.names, (ids, mask, types), strict=True)})
        chosen = mask.bool().numpy() if found.ndim == 3 else np.ones(len(ids), bool)
        np.testing.assert_allclose(found[chosen], expected[chosen], rtol=1e-4, atol=1e-5)


def test_a_folder_of_arrays_needs_numpy_and_tokenizers_only(tokenizer, tmp_path):
    student = build_student(build_model("bert"), "static,embeddings=8", tokenizer=tokenizer).eval()
    write_targets(Source(student, tokenizer), [find_target("numpy")], tmp_path)
    folder, inputs = tmp_path / "numpy", tokenizer("good", return_tensors="pt")
    done = subprocess.run([sys.executable, "-c", READ], cwd=folder, capture_output=True, text=True, check=True)
    with torch.no_grad():
        expected = student(**inputs).logits[0].numpy()
    np.testing.assert_allclose([float(each) for each in done.stdout.split()], expected, rtol=1e-4, atol=1e-5)
    words = subprocess.run(
        [sys.executable, "reader.py"], cwd=folder, input="bad\ngood\n", capture_output=True, text=True, check=True
    )
    named = student.config.id2label[int(expected.argmax())]
    assert words.stdout.splitlines()[1] == f"{named}\tgood"


def test_a_model_with_attention_has_no_arrays(tokenizer, tmp_path):
    with pytest.raises(ExportError, match="numpy: expected a student without attention"):
        write_targets(Source(build_model("bert").eval(), tokenizer), [find_target("numpy")], tmp_path)


def draw_batch(*lengths: int) -> dict[str, torch.Tensor]:
    mask = torch.tensor([[1] * each + [0] * (max(lengths) - each) for each in lengths])
    ids = torch.randint(5, 60, mask.shape, generator=torch.Generator().manual_seed(len(lengths))) * mask
    types = (torch.arange(ids.shape[1]) >= 2).long().expand_as(ids)
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}


def to_arrays(batch: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in batch.items()}


def quantized_source(spec: str, scheme: str, tokenizer, **changes) -> Source:
    student = build_student(build_model("bert", **changes), spec, tokenizer=tokenizer)
    if student.vectors.ngrams is not None:
        torch.nn.init.normal_(student.vectors.ngrams.weight)
    prepare_quantized(student, resolve_scheme(scheme))
    calibrate(student, [draw_batch(9, 7, 3)])
    return Source(student.eval(), tokenizer, convert_quantized(student))


QUANTIZED = (
    "static,ngrams=64,embeddings=32",
    "cnn,layers=2,pooling=weighted,embeddings=32",
    "gru,hidden=16,embeddings=32",
)


@pytest.mark.parametrize("scheme", ["int8-static", "int8-weights"])
@pytest.mark.parametrize("spec", QUANTIZED)
def test_numpy_computes_with_the_integers_of_a_quantized_student(spec, scheme, tokenizer, tmp_path):
    source = quantized_source(spec, scheme, tokenizer)
    target, batch = find_target("numpy-int8"), draw_batch(9, 4, 2, 9)
    write_targets(source, [target], tmp_path)
    assert check_layers(source, target, tmp_path, to_arrays(batch)) < 1e-6
    stored = np.load(tmp_path / "numpy-int8" / "weights.npz")
    for name, width in (("words", 32), *([("ngrams", 32)] if "ngrams" in spec else [])):
        assert stored[name].dtype == np.int8
        assert stored[name].nbytes + stored[f"{name}.scales"].nbytes == len(stored[name]) * (width + 4)
    assert stored["dense.weight"].dtype == stored["classifier.weight"].dtype == np.int8
    if scheme == "int8-weights":  # with rounded inputs a last bit can move a value by a step
        logits = open_export(target, tmp_path / "numpy-int8", 1)(to_arrays(batch))
        with torch.no_grad():
            reference = copy.deepcopy(source.model).double()(**batch).logits.numpy()
            naive = source.model(**batch).logits.numpy()
        assert np.abs(logits - reference).max() <= 2 * np.abs(naive - reference).max() + 1e-6 * np.abs(reference).max()


@pytest.mark.slow
@pytest.mark.parametrize("form", ["onnxruntime", "openvino"])
def test_a_runtimes_file_looks_bytes_up(form, tokenizer, tmp_path):
    spec = QUANTIZED[0] if form == "onnxruntime" else "static,embeddings=32"  # OpenVINO can't hash pairs
    source = quantized_source(spec, "int8-static", tokenizer)
    target, batch = find_target(f"{form}-int8"), draw_batch(9, 4, 2, 9)
    write_targets(source, [target], tmp_path)
    assert check_layers(source, target, tmp_path, to_arrays(batch)) < 1e-6
    graph = onnx.load(str(tmp_path / "onnxruntime-int8" / "model.onnx")).graph if form == "onnxruntime" else None
    if graph is not None:
        kinds = {each.name: each.data_type for each in graph.initializer}
        looked_up = {node.input[0] for node in graph.node if node.op_type == "Gather"}
        assert kinds["vectors.words.int8"] == kinds["vectors.ngrams.int8"] == onnx.TensorProto.INT8
        assert {"vectors.words.int8", "vectors.ngrams.int8"} <= looked_up
    found = open_export(target, tmp_path / str(target), 1)(to_arrays(batch))
    expected = source.runner(to_arrays(batch))
    assert np.abs(found - expected).max() <= 0.02 * np.abs(expected).max()


@pytest.mark.slow
def test_rows_of_bytes_that_a_product_reads_directly_have_scales_of_their_own(tokenizer, tmp_path):
    source = quantized_source("cnn,layers=1,embeddings=32", "int8-dynamic", tokenizer)
    target = find_target("onnx-int8")
    write_targets(source, [target], tmp_path)  # no norm is between the table and the first layer
    assert check_layers(source, target, tmp_path, to_arrays(draw_batch(9, 4))) < 1e-6


@pytest.mark.slow
def test_a_second_recurrent_student_of_a_process_is_exported_with_any_length(tokenizer, tmp_path):
    for folder in (tmp_path / "first", tmp_path / "second"):
        student = build_student(build_model("bert"), "gru,hidden=16,layers=2", tokenizer=tokenizer).eval()
        write_targets(Source(student, tokenizer), [find_target("onnx")], folder)
        assert OnnxModel(folder / "onnx", threads=1)(to_arrays(draw_batch(11, 3))).shape == (2, len(LABELS))


def test_weights_of_tokens_stay_in_float(tokenizer):
    student = build_student(build_model("bert"), "static", tokenizer=tokenizer)
    assert prepare_quantized(student, resolve_scheme("int8-static")) == ["vectors.words", "dense", "classifier"]


def read_with_numpy(student, tokenizer, folder: Path):
    write_targets(Source(student.eval(), tokenizer), [find_target("numpy")], folder)
    return open_export("numpy", folder / "numpy", 1)


def test_a_reader_returns_label_sets_scores_or_tags_according_to_the_task(tokenizer, tmp_path):
    texts = ["baka bale", "bami"]
    several = build_model("bert", problem_type="multi_label_classification")
    reader = read_with_numpy(build_student(several, "static", tokenizer=tokenizer), tokenizer, tmp_path / "several")
    for labels, logits in reader.classify(texts):
        assert labels == [LABELS[i] for i in np.flatnonzero(logits > 0)]
    number = build_model("bert", num_labels=1, id2label={0: "score"}, problem_type="regression")
    reader = read_with_numpy(build_student(number, "cnn", tokenizer=tokenizer), tokenizer, tmp_path / "number")
    assert [value for value, _ in reader.classify(texts)] == [float(each[0]) for _, each in reader.classify(texts)]
    tagger = build_model("bert", "ForTokenClassification")
    reader = read_with_numpy(build_student(tagger, "gru", tokenizer=tokenizer), tokenizer, tmp_path / "tags")
    (longer, logits), (shorter, _) = reader.classify(texts)
    assert (len(longer), len(shorter)) == (2, 1)
    assert longer[1] == LABELS[int(logits[2].argmax())]  # the first token is special


@pytest.mark.parametrize("spec", ["static,ngrams=64,pooling=weighted+max", "cnn,layers=2", "gru,hidden=16"])
def test_a_reader_encodes_sentences(spec, tokenizer, tmp_path):
    encoder = PooledModel.from_pretrained(saved(build_model("bert", "Model"), tokenizer, tmp_path / "teacher"))
    student = build_student(encoder, spec, tokenizer=tokenizer)
    texts = ["baka bale bami", "bami"]
    found = read_with_numpy(student, tokenizer, tmp_path).encode(texts)
    with torch.no_grad():
        expected = student(**tokenizer(texts, padding=True, return_tensors="pt")).logits.numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    lines = subprocess.run(
        [sys.executable, "reader.py"],
        cwd=tmp_path / "numpy",
        input="bami\n",
        capture_output=True,
        text=True,
        check=True,
    )
    numbers, text = lines.stdout.rstrip("\n").split("\t")
    np.testing.assert_allclose([float(each) for each in numbers.split()], expected[1], rtol=1e-4, atol=1e-6)
    assert text == "bami"


@pytest.mark.parametrize("pooling", ["mean", "weighted", "weighted+max", "max+mean+weighted"])
@pytest.mark.parametrize("scheme", [None, "int8-static"])
def test_tokens_are_pooled_without_padding_as_in_padded_batches(pooling, scheme, tokenizer, tmp_path):
    spec = f"static,embeddings=32,pooling={pooling}"
    student = build_student(build_model("bert"), spec, tokenizer=tokenizer).eval()
    source = quantized_source(spec, scheme, tokenizer) if scheme else Source(student, tokenizer)
    target = find_target("numpy-int8" if scheme else "numpy")
    write_targets(source, [target], tmp_path)
    reader, texts = Reader(tmp_path / str(target)), [text for text, _ in make_rows(40, 3)] + ["", "one"]
    assert reader.words is not None
    padded = Reader(tmp_path / str(target))
    padded.__dict__["pools_tokens"] = False
    assert padded.words is None
    for (label, logits), (expected_label, expected_logits) in zip(
        reader.classify(texts), padded.classify(texts), strict=True
    ):
        assert label == expected_label
        assert np.abs(logits - expected_logits).max() < 1e-5


def test_other_kinds_of_students_read_padded_batches(tokenizer, tmp_path):
    for number, spec in enumerate(("cnn", "static,pooling=order", "static,ngrams=64")):
        student = build_student(build_model("bert"), f"{spec},embeddings=16", tokenizer=tokenizer).eval()
        write_targets(Source(student, tokenizer), [find_target("numpy")], tmp_path / str(number))
        assert Reader(tmp_path / str(number) / "numpy").words is None
