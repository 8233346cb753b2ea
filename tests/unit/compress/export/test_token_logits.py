"""Tests exports of models with token-level logits: masked language models and question answering."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.export.common.huggingface import TorchModel, input_names
from compress.export.common.source import Source
from compress.export.common.targets import ExportTarget
from compress.export.onnx.graph import ONNX_FILE, OnnxModel
from compress.export.verify import flatten_tokens, verify_export
from compress.export.write import write_targets
from support.tiny_models import MAX_LENGTH, VOCABULARY, build_model, make_rows

TEXTS = [text for text, _ in make_rows(7, 5)] + ["badi"]
CASES = {
    "bert words": ("bert", "ForMaskedLM"),
    "distilbert answers": ("distilbert", "ForQuestionAnswering"),
    "bert answers": ("bert", "ForQuestionAnswering"),
    "electra answers": ("electra", "ForQuestionAnswering"),
    "distilbert words": ("distilbert", "ForMaskedLM"),
    "roberta words": ("roberta", "ForMaskedLM"),
}
SLOW = list(CASES)[1:]


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES]
)
def exported(request: pytest.FixtureRequest, tokenizer, tmp_path_factory) -> tuple[PreTrainedModel, Path]:
    """A model and the folder of its targets."""
    kind, head = CASES[request.param]
    labels = {"id2label": {0: "start", 1: "end"}, "label2id": {"start": 0, "end": 1}} if "Question" in head else {}
    layers = {"n_layers" if kind == "distilbert" else "num_hidden_layers": 2}
    model, folder = build_model(kind, head, **layers, **labels), tmp_path_factory.mktemp("written")
    write_targets(Source(model, tokenizer), [ExportTarget("huggingface"), ExportTarget("onnxruntime")], folder)
    return model, folder


@torch.no_grad()
def compute_unpadded_logits(model: PreTrainedModel, batch: dict[str, np.ndarray]) -> np.ndarray:
    """Returns logits of each text alone, without padding: [tokens, vocabulary], or [tokens, 2] for start and end."""
    rows = []
    for row, length in enumerate(batch["attention_mask"].sum(1)):
        inputs = {name: torch.from_numpy(batch[name][row : row + 1, :length]) for name in input_names(model.config)}
        out = model(**inputs)
        if "ForQuestionAnswering" in type(model).__name__:
            rows.append(torch.cat([out.start_logits, out.end_logits]).T)
        else:
            rows.append(out.logits[0])
    return torch.cat(rows).numpy()


def batch_of(tokenizer: PreTrainedTokenizerBase) -> dict[str, np.ndarray]:
    return dict(tokenizer(TEXTS, padding=True, return_tensors="np"))


@pytest.mark.parametrize("target", ["huggingface", "onnx", "onnxruntime"])
def test_exported_token_logits_match_the_models_at_every_position(exported, tokenizer, target):
    model, folder = exported
    batch, model_logits = batch_of(tokenizer), compute_unpadded_logits(model, batch_of(tokenizer))
    assert model_logits.shape[1] == (2 if "Question" in type(model).__name__ else len(VOCABULARY))
    assert np.abs(model_logits - model_logits[:, ::-1]).max() > 0.1, "a start is like an end"
    runner = TorchModel(folder / target) if target == "huggingface" else OnnxModel(folder / target, threads=1)
    logits = runner(batch)
    assert logits.shape[:2] == batch["input_ids"].shape
    np.testing.assert_allclose(flatten_tokens(logits, batch["attention_mask"]), model_logits, rtol=0, atol=2e-4)
    if target != "huggingface":
        assert verify_export(target, folder / target, TEXTS, None, MAX_LENGTH, model_logits)[0].max_difference < 2e-4


def test_graphs_have_logits_as_their_only_output(exported):
    _, folder = exported
    for target in ("onnx", "onnxruntime"):
        (output,) = onnx.load(folder / target / ONNX_FILE).graph.output
        assert output.name == "logits"


@pytest.mark.slow
def test_a_tied_embedding_table_is_written_once(tmp_path, tokenizer):
    model = build_model("bert", "ForMaskedLM", vocab_size=20_000, num_hidden_layers=1)
    write_targets(Source(model, tokenizer), [ExportTarget("onnx")], tmp_path)
    assert (tmp_path / "onnx" / ONNX_FILE).stat().st_size < 1.3 * sum(each.nbytes for each in model.parameters())
