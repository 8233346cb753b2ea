"""ONNX files of students without attention compute what the student does, for rows of any number and length."""

import numpy as np
import pytest
import torch

from compress.export.common.source import Source
from compress.export.common.targets import target_of
from compress.export.onnx.graph import OnnxModel
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
