"""Serving examples: they classify like the exported model, and all except the ExecuTorch one without torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from compress.export.common.source import Source
from compress.export.common.targets import ExportTarget
from compress.export.write import write_targets
from support.commands import ROOT
from support.tiny_models import build_model, word_tokenizer

TEXTS = ["bado bado badi", "bade bada", "badu"]
LENGTH = 16  # tokens; exporting to LiteRT takes seconds for each length


@pytest.fixture(scope="module")
def source() -> Source:
    tokenizer = word_tokenizer(model_max_length=LENGTH)
    return Source(build_model("bert", num_hidden_layers=1), tokenizer)


def score_classes(source: Source) -> list[tuple[str, float]]:
    batch = source.tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        probabilities = source.model(**batch).logits.softmax(-1)
    return [(source.model.config.id2label[int(row.argmax())], float(row.max())) for row in probabilities]


@pytest.mark.parametrize(
    "form",
    ["onnxruntime", *(pytest.param(form, marks=pytest.mark.slow) for form in ("openvino", "litert", "executorch"))],
)
def test_a_serving_example_prints_the_models_classes_and_probabilities(form: str, source: Source, tmp_path: Path):
    write_targets(source, [ExportTarget(form)], tmp_path)
    script = str(ROOT / "examples" / f"serve_{form}.py")
    code = (
        f"import runpy, sys; sys.argv = sys.argv[1:]; sys.path.insert(0, {str(ROOT / 'examples')!r}); "
        "runpy.run_path(sys.argv[0], run_name='__main__'); "
        f"assert {form == 'executorch'} or 'torch' not in sys.modules, 'torch was imported'"
    )
    arguments = [sys.executable, "-c", code, script, str(tmp_path / form), *TEXTS]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    rows = [line.split("\t") for line in done.stdout.splitlines() if "\t" in line]
    assert [row[2] for row in rows] == TEXTS
    for (label, probability, _), (expected_label, expected_probability) in zip(
        rows, score_classes(source), strict=True
    ):
        assert label == expected_label
        assert float(probability) == pytest.approx(expected_probability, abs=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{"architectures": ["BertForTokenClassification"]}, {"problem_type": "multi_label_classification"}]
)
def test_a_serving_example_rejects_token_and_multi_label_classifiers(changes: dict, source: Source, tmp_path: Path):
    write_targets(source, [ExportTarget("onnxruntime")], tmp_path)
    file = tmp_path / "onnxruntime" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    assert "expected a single-label text classifier" in read_rejection("serve_onnxruntime", str(file.parent), *TEXTS)


def read_rejection(example: str, *arguments: str) -> str:
    """Runs an example that must end with exit code 2 and returns its single error line."""
    command = [sys.executable, str(ROOT / "examples" / f"{example}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    return line


EXAMPLES = [
    ("serve_onnxruntime", "model.onnx"),
    ("serve_openvino", "model.xml"),
    ("serve_litert", "model.tflite"),
    pytest.param("serve_executorch", "model.pte", marks=pytest.mark.slow),
    ("generate_onnxruntime", "model.onnx"),
]


@pytest.mark.parametrize(("example", "model"), EXAMPLES)
def test_an_example_rejects_unusable_folders_with_one_line(example: str, model: str, tmp_path: Path):
    nowhere, file, empty, damaged = (tmp_path / name for name in ("nowhere", "file", "empty", "damaged"))
    file.write_text("")
    empty.mkdir()
    damaged.mkdir()
    (damaged / "config.json").write_text('{"id2label": {"0": "yes"}}')
    for name in ("tokenizer.json", "generation_config.json", "inputs.json", "model.bin", model):
        (damaged / name).write_text("{")
    assert f"{nowhere}: expected a folder that a run exported, found nothing there" in read_rejection(
        example, str(nowhere), "x"
    )
    assert f"{file}: expected a folder that a run exported, found a file" in read_rejection(example, str(file), "x")
    assert "found no config.json and no " in read_rejection(example, str(empty), "x")
    assert f"{damaged}/" in (line := read_rejection(example, str(damaged), "x"))
    assert "can't be read: " in line


@pytest.mark.slow
def test_examples_reject_a_classifiers_folder_that_does_not_fit(source: Source, tmp_path: Path):
    write_targets(source, [ExportTarget("onnxruntime")], tmp_path)
    folder = tmp_path / "onnxruntime"
    assert "found no generation_config.json" in read_rejection("generate_onnxruntime", str(folder), "x")
    (folder / "generation_config.json").write_text("{}")
    assert "expected a decoder with a key-value cache" in read_rejection("generate_onnxruntime", str(folder), "x")
    assert "found no model.xml and no model.bin" in read_rejection("serve_openvino", str(folder), *TEXTS)
    assert "expected a folder and texts, found 1 arguments" in read_rejection("serve_onnxruntime", str(folder))
    (folder / "config.json").write_text("[")
    assert "config.json: can't be read" in read_rejection("serve_onnxruntime", str(folder), *TEXTS)
    (folder / "config.json").write_text('{"id2label": {}}')
    assert "expected the classes in id2label" in read_rejection("serve_onnxruntime", str(folder), *TEXTS)
