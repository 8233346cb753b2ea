"""Files of students without attention compute what the student does, for rows of any number and length."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from compress.errors import ArtefactError
from compress.export.common.source import Source
from compress.export.common.targets import target_of
from compress.export.onnx.graph import OnnxModel
from compress.export.runtimes import open_export
from compress.export.write import write_targets
from distill.student.build import build_student
from support.tiny_models import build_model


@pytest.mark.parametrize("spec", [
    "static,ngrams=64,pooling=weighted+max",
    pytest.param("cnn,layers=2", marks=pytest.mark.slow),
    pytest.param("gru,hidden=16,layers=2", marks=pytest.mark.slow),
])  # fmt: skip
def test_an_onnx_file_has_the_logits_of_its_student(spec, tokenizer, tmp_path):
    student = build_student(build_model("bert"), f"{spec},embeddings=8", tokenizer=tokenizer).eval()
    write_targets(Source(student, tokenizer), [target_of("onnxruntime")], tmp_path)
    onnx = OnnxModel(tmp_path / "onnxruntime", threads=1)
    for lengths in ([1], [7], [3, 9, 5]):
        mask = torch.tensor([[1] * each + [0] * (max(lengths) - each) for each in lengths])
        ids = torch.randint(5, 60, mask.shape, generator=torch.Generator().manual_seed(len(lengths))) * mask
        with torch.no_grad():
            expected = student(input_ids=ids, attention_mask=mask).logits.numpy()
        found = onnx({name: value.numpy() for name, value in (("input_ids", ids), ("attention_mask", mask))})
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


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
    write_targets(Source(student, tokenizer), [target_of("numpy")], tmp_path)
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
    write_targets(Source(student, tokenizer), [target_of("numpy")], tmp_path)
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
    with pytest.raises(ArtefactError, match="numpy: expected a student without attention"):
        write_targets(Source(build_model("bert").eval(), tokenizer), [target_of("numpy")], tmp_path)
