"""The examples that serve: they classify from an exported folder as the model does, and all but one without torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import BertTokenizerFast

from compress.export.source import Source
from compress.export.targets import Target
from compress.export.write import write_targets
from conftest import VOCABULARY, build_model

ROOT = Path(__file__).parent.parent
TEXTS = ["bado bado badi", "bade bada", "badu"]
LENGTH = 16  # tokens; LiteRT's files take seconds for each length


@pytest.fixture(scope="module")
def source() -> Source:
    tokenizer = BertTokenizerFast(vocab={w: i for i, w in enumerate(VOCABULARY)}, model_max_length=LENGTH)
    return Source(build_model("bert", num_hidden_layers=1), tokenizer)


def said(source: Source) -> list[tuple[str, float]]:
    batch = source.tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        chances = source.model(**batch).logits.softmax(-1)
    return [(source.model.config.id2label[int(row.argmax())], float(row.max())) for row in chances]


@pytest.mark.parametrize(
    "form", ["onnxruntime", "openvino", "litert", pytest.param("executorch", marks=pytest.mark.slow)]
)
def test_an_example_says_something_else(form: str, source: Source, tmp_path: Path):
    write_targets(source, [Target(form)], tmp_path)
    script = str(ROOT / "examples" / f"serve_{form}.py")
    code = (
        "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__'); "
        f"assert {form == 'executorch'} or 'torch' not in sys.modules, 'torch was imported'"
    )
    words = [sys.executable, "-c", code, script, str(tmp_path / form), *TEXTS]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    rows = [line.split("\t") for line in done.stdout.splitlines() if "\t" in line]
    assert [row[2] for row in rows] == TEXTS
    for (label, chance, _), (own, most) in zip(rows, said(source), strict=True):
        assert label == own
        assert float(chance) == pytest.approx(most, abs=2e-3)


@pytest.mark.parametrize(
    "changes", [{"architectures": ["BertForTokenClassification"]}, {"problem_type": "multi_label_classification"}]
)
def test_an_example_makes_one_class_of_tags_or_of_several_labels(changes: dict, source: Source, tmp_path: Path):
    write_targets(source, [Target("onnxruntime")], tmp_path)
    file = tmp_path / "onnxruntime" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    words = [sys.executable, str(ROOT / "examples" / "serve_onnxruntime.py"), str(file.parent), *TEXTS]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 1
    assert "expected a model of one class a text" in done.stderr
    assert "Traceback" not in done.stderr
