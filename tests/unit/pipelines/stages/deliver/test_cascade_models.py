"""Tests at which length the models of a cascade cut texts."""

from types import SimpleNamespace
from typing import Any

import pytest

from compress.export.common.targets import ExportTarget
from distill.data.config import DataConfig
from distill.data.splits.examples import Examples, Splits
from distill.tasks.text_classification import TextClassification
from pipelines.settings.commands.cascade import CascadeConfig
from pipelines.stages.deliver.cascade_models import CascadeModels
from support.tiny_models import LABELS, build_model, saved, word_tokenizer

LONG = Examples(["perhaps " * 100], None, [0])


@pytest.fixture
def models(tmp_path) -> CascadeModels:
    """Two students, one of which was trained on shorter texts than the data allows."""

    def build(name: str, longest: int) -> Any:
        folder = saved(build_model("bert"), word_tokenizer(model_max_length=longest), tmp_path / name)
        return SimpleNamespace(name=name, targets=[ExportTarget("onnxruntime")], path=lambda target: folder)

    config = CascadeConfig("a,b", output="out", data=DataConfig("unread", max_length=32), min_score_share=0.9)
    run: Any = SimpleNamespace(seed=0)
    models = CascadeModels(run, config, run, [build("short", 16), build("long", 64)])
    models.task = TextClassification(LABELS)
    models.splits = Splits(LABELS, LONG, LONG, LONG, Examples([], None), {})
    return models


def test_the_reader_cuts_texts_where_the_evaluation_does(models):
    encoded = {name: len(models.encode(name, "test")[0].input_ids[0]) for name in models.models}
    assert models.find_max_lengths() == encoded == {"short": 16, "long": 32}
