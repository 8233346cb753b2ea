"""Tests that exported files match the model in a fresh process, at any batch size and length, or are rejected."""

import functools
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertPreTrainedModel,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import ModelOutput

from compress.errors import ExportError
from compress.export.common.huggingface import WEIGHTS, export_huggingface, input_names
from compress.export.onnx import fuse as fusing
from compress.export.onnx.fuse import fuse_operators
from compress.export.onnx.graph import ONNX_FILE, OPSET, OnnxModel, export_onnx
from compress.export.onnx.int8 import products_saturate, quantize_int8
from compress.export.openvino import ir
from compress.export.openvino.ir import export_openvino
from compress.export.verify import BATCH, Parity, check_parity, compare_logits, verify_export
from support.commands import fork_verifications
from support.tiny_models import MODELS, VOCABULARY, build_model, make_rows, word_tokenizer

TARGETS = ("huggingface", "onnx", "onnxruntime", "openvino")
LAYERS = 2
LIMIT = 24  # tokens; the last text below is longer
TEXTS = [text for text, _ in make_rows(18, 5)] + ["badi", "?!", " ".join(VOCABULARY[-40:])]
PAIRS = [text for text, _ in make_rows(len(TEXTS), 6)]

# Every family of conftest works with its tokenizer: all pad with id 0, including RoBERTa, whose positions count from
# the pad id. As published, RoBERTa and XLM-R pad with 1 and have one token type; here XLM-R does, with a tokenizer to
# match.
AS_PUBLISHED = {"xlm-roberta": {"pad_token_id": 1, "type_vocab_size": 1}}


@dataclass(frozen=True)
class Exported:
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    folders: dict[str, Path]


def build(family: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    layers = {"n_layers" if family == "distilbert" else "num_hidden_layers": LAYERS}
    model, words = build_model(family, **layers, **AS_PUBLISHED.get(family, {})), list(VOCABULARY)
    if model.config.pad_token_id == 1:
        words[:2] = words[1::-1]
    return model, word_tokenizer(words)


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Exported]:
    """`export(family)` -> a tiny classifier in every format, exported once. Tests that change a file use a copy."""

    @functools.cache
    def write(family: str) -> Exported:
        (model, tokenizer), folder = build(family), tmp_path_factory.mktemp(family)
        artefact = Exported(model, tokenizer, {target: folder / target for target in (*TARGETS, "onnxruntime-int8")})
        export_huggingface(model, tokenizer, folder / "huggingface")
        export_onnx(model, tokenizer, folder / "onnx", input_names(model.config))
        write_target(fuse_operators, artefact, "onnx", "onnxruntime")
        write_target(
            functools.partial(quantize_int8, reduce_range=products_saturate()),
            artefact,
            "onnxruntime",
            "onnxruntime-int8",
        )
        write_target(export_openvino, artefact, "onnx", "openvino")
        return artefact

    return write


def write_target(convert: Callable[[Path, Path], object], artefact: Exported, source: str, target: str) -> None:
    convert(
        artefact.folders[source] / ONNX_FILE,
        artefact.folders[target] / (ir.OPENVINO_FILE if target == "openvino" else ONNX_FILE),
    )
    artefact.tokenizer.save_pretrained(artefact.folders[target])
    artefact.model.config.save_pretrained(artefact.folders[target])


TAKES_LONG = [family for family in MODELS if family != "bert"]


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.slow] * (name in TAKES_LONG)) for name in MODELS])
def exported(request: pytest.FixtureRequest, export) -> Exported:
    """The exported classifier of each family in turn."""
    return export(request.param)


@pytest.fixture
def bert(export) -> Exported:
    return export("bert")


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_verifications(monkeypatch)


@torch.no_grad()
def logits(artefact: Exported, texts: Sequence[str] = TEXTS, pairs: Sequence[str] | None = None) -> np.ndarray:
    """Returns the model's logits [texts, classes], computed text by text and therefore without padding."""
    rows = []
    for i, text in enumerate(texts):
        second = None if pairs is None else pairs[i]
        row = artefact.tokenizer(text, second, truncation=True, max_length=LIMIT, return_tensors="pt")
        rows.append(artefact.model(**{name: row[name] for name in input_names(artefact.model.config)}).logits[0])
    return torch.stack(rows).numpy()


# --- round trips


def test_a_reloaded_checkpoint_has_the_same_weights_and_labels(exported):
    folder = exported.folders["huggingface"]
    loaded, expected = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert type(loaded) is type(exported.model)
    assert not any(expected[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    theirs = loaded.state_dict()
    assert theirs.keys() == exported.model.state_dict().keys()
    assert all(torch.equal(theirs[name], value) for name, value in exported.model.state_dict().items())
    assert loaded.config.id2label == exported.model.config.id2label
    assert not [file.name for file in folder.iterdir() if file.suffix in (".bin", ".pt", ".pkl")]


@pytest.mark.parametrize("target", TARGETS)
def test_a_fresh_process_computes_the_models_logits(exported, target, monkeypatch):
    if not isinstance(exported.model, BertPreTrainedModel):
        fork_verifications(monkeypatch)  # only one family's process imports PyTorch, which takes seconds
    expected = logits(exported)
    assert expected.std(0).min() > 0.05, "the model says the same of every text"
    proof, _ = verify_export(target, exported.folders[target], TEXTS, None, LIMIT, expected)
    assert (proof.target, proof.rows, proof.agreement) == (target, len(TEXTS), 1.0)
    assert proof.mean_difference <= proof.max_difference < 1e-4
    assert proof.load_ms > 0
    assert proof.peak_bytes > 20e6, "Python alone takes more"


def test_peak_memory_of_a_fresh_process_excludes_its_parents_memory(exported):
    parent_array = np.ones(150_000_000)  # 1.2 GB
    proof, _ = verify_export("onnx", exported.folders["onnx"], TEXTS, None, LIMIT, logits(exported))
    assert proof.peak_bytes < parent_array.nbytes / 2


@pytest.mark.parametrize("target", TARGETS)
def test_text_pairs_keep_their_token_types(bert, target, forked):
    expected = logits(bert, TEXTS, PAIRS)
    untyped = Exported(without_token_types(bert.model), bert.tokenizer, {})
    assert np.abs(logits(untyped, TEXTS, PAIRS) - expected).max() > 0.1, "token types make no difference here"
    assert verify_export(target, bert.folders[target], TEXTS, PAIRS, LIMIT, expected)[0].max_difference < 1e-4


def without_token_types(model: PreTrainedModel) -> PreTrainedModel:
    """Returns a copy that gives both texts of a pair the embedding of token type 0."""
    copy = type(model)(model.config).eval()
    copy.load_state_dict(model.state_dict())
    types = copy.bert.embeddings.token_type_embeddings.weight.data
    types[1] = types[0]
    return copy


@pytest.mark.parametrize(("rows", "length"), [(1, 3), (5, 11), (2, 40)])
def test_onnx_logits_match_the_model_at_any_batch_size_and_length(exported, rows, length):
    model = OnnxModel(exported.folders["onnx"], threads=1)
    assert model.names == input_names(exported.model.config)
    random = np.random.default_rng(length)
    mask = (np.arange(length) < random.integers(2, length + 1, (rows, 1))).astype(np.int64)
    mask[0] = 1
    ids = np.where(mask, random.integers(5, len(VOCABULARY), mask.shape), exported.tokenizer.pad_token_id)
    batch = {"input_ids": ids, "attention_mask": mask, "token_type_ids": mask * random.integers(0, 2, mask.shape)}
    with torch.no_grad():
        ours = exported.model(**{name: torch.from_numpy(batch[name]) for name in model.names}).logits.numpy()
    assert ours.shape == (rows, 5)
    np.testing.assert_allclose(model(batch), ours, rtol=0, atol=1e-4)


def test_an_onnx_folder_is_self_contained(exported):
    folder = exported.folders["onnx"]
    graph = onnx.load(folder / ONNX_FILE, load_external_data=False)
    onnx.checker.check_model(graph)
    assert [entry.version for entry in graph.opset_import if entry.domain == ""] == [OPSET]
    assert not [weight.name for weight in graph.graph.initializer if weight.data_location]
    assert AutoConfig.from_pretrained(folder).id2label == exported.model.config.id2label
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer(TEXTS)["input_ids"] == exported.tokenizer(TEXTS)["input_ids"]


# --- ONNX Runtime operators and int8


def test_operators_are_fused_and_padding_is_ignored(exported):
    graph = onnx.load(exported.folders["onnxruntime"] / ONNX_FILE).graph
    operators = Counter(node.op_type for node in graph.node)
    assert (
        operators["Attention"],
        operators["BiasGelu"],
        operators["Softmax"],
        operators["SkipLayerNormalization"],
    ) == (
        LAYERS,
        LAYERS,
        0,
        0,
    )
    assert all(len(node.input) == 4 for node in graph.node if node.op_type == "Attention"), "reads the raw mask"
    before = len(onnx.load(exported.folders["onnx"] / ONNX_FILE).graph.node)
    assert len(graph.node) < before / 3
    alone, padded = (OnnxModel(exported.folders[name], threads=1) for name in ("onnxruntime", "onnxruntime"))
    ids = np.random.default_rng(3).integers(5, len(VOCABULARY), (1, 6))
    single = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    wider = {name: np.pad(value, ((0, 0), (0, 7))) for name, value in single.items()}
    wider["input_ids"][:, 6:] = exported.tokenizer.pad_token_id
    np.testing.assert_allclose(alone(single), padded(wider), rtol=0, atol=1e-4)


def test_a_fused_graph_with_other_logits_is_rejected_and_not_written(bert, tmp_path, monkeypatch):
    monkeypatch.setattr(fusing, "matches_source", lambda source, model: False)
    with pytest.raises(ExportError, match="expected the same logits after fusing operators"):
        fuse_operators(bert.folders["onnx"] / ONNX_FILE, tmp_path / ONNX_FILE)
    assert not (tmp_path / ONNX_FILE).exists()


def test_a_graph_with_a_changed_bias_does_not_agree(bert, tmp_path):
    graph = onnx.load(bert.folders["onnxruntime"] / ONNX_FILE)
    assert fusing.matches_source(bert.folders["onnx"] / ONNX_FILE, graph)
    (bias,) = (weight for weight in graph.graph.initializer if weight.name.endswith("classifier.bias"))
    bias.CopyFrom(onnx.numpy_helper.from_array(np.float32([0, 0, 0, 0.1, 0]), bias.name))
    assert not fusing.matches_source(bert.folders["onnx"] / ONNX_FILE, graph)


def test_int8_stores_all_matrices_in_8_bits_and_stays_close_to_the_model(exported):
    whole, small = (exported.folders[name] / ONNX_FILE for name in ("onnxruntime", "onnxruntime-int8"))
    graph = onnx.load(small).graph
    operators = Counter(node.op_type for node in graph.node)
    assert operators["QAttention"] == LAYERS
    assert not any(operators[name] for name in ("Attention", "MatMul", "Gemm"))
    wide = [w for w in graph.initializer if len(w.dims) == 2 and w.data_type == onnx.TensorProto.FLOAT]
    assert not [w.name for w in wide if w.dims[1] > 1], "a matrix is still in 32 bits"  # scales have one column
    assert small.stat().st_size < whole.stat().st_size / 2
    expected = logits(exported)
    proof, _ = verify_export(
        "onnxruntime-int8", small.parent, TEXTS, None, LIMIT, compute_onnx_logits(exported, small.parent)
    )
    assert proof.agreement == 1
    assert np.abs(compute_onnx_logits(exported, small.parent) - expected).mean() < expected.std() / 3


def compute_onnx_logits(artefact: Exported, folder: Path) -> np.ndarray:
    """Returns the logits of an ONNX file for TEXTS, batched and padded as in a fresh process."""
    model, parts = OnnxModel(folder, threads=1), []
    for start in range(0, len(TEXTS), BATCH):
        rows = artefact.tokenizer(
            TEXTS[start : start + BATCH], padding=True, truncation=True, max_length=LIMIT, return_tensors="np"
        )
        parts.append(model({name: rows[name] for name in model.names}))
    return np.concatenate(parts)


# --- rejected files


def copy_target(artefact: Exported, target: str, folder: Path) -> Path:
    return shutil.copytree(artefact.folders[target], folder / target)


def test_swapped_layers_are_rejected(bert, tmp_path, forked):
    folder = copy_target(bert, "huggingface", tmp_path)
    weights = load_file(folder / WEIGHTS)
    first, second = (f"bert.encoder.layer.{i}.attention.self.query.weight" for i in (0, 1))
    weights[first], weights[second] = weights[second], weights[first]
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(ExportError, match="has other logits than the trained model") as caught:
        verify_export("huggingface", folder, TEXTS, None, LIMIT, logits(bert))
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("change", ["rows in another order", "another model's", "not a number", "a class too few"])
def test_mismatched_logits_are_rejected(bert, change):
    expected = logits(bert)
    wrong = {
        "rows in another order": expected[::-1],
        "another model's": logits(Exported(build_model("bert", hidden_act="relu"), bert.tokenizer, {})),
        "not a number": np.where(np.arange(len(TEXTS))[:, None] == 7, np.nan, expected),
        "a class too few": expected[:, :-1],
    }[change]
    with pytest.raises(ExportError, match=r"other logits|expected logits \(21, 4\), found \(21, 5\)"):
        verify_export("onnx", bert.folders["onnx"], TEXTS, None, LIMIT, wrong)


def test_a_model_that_outputs_nan_is_rejected(bert, tmp_path):
    folder = copy_target(bert, "onnx", tmp_path)
    graph = onnx.load(folder / ONNX_FILE)
    (bias,) = (weight for weight in graph.graph.initializer if weight.name.endswith("classifier.bias"))
    bias.CopyFrom(onnx.numpy_helper.from_array(np.float32([0, 0, 0, np.nan, 0]), bias.name))
    onnx.save(graph, folder / ONNX_FILE)
    with pytest.raises(ExportError, match="largest difference nan"):
        verify_export("onnx", folder, TEXTS, None, LIMIT, logits(bert))


@pytest.mark.parametrize("target", TARGETS)
def test_an_artefact_without_its_tokenizer_is_rejected(bert, target, tmp_path, forked):
    folder = copy_target(bert, target, tmp_path)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ExportError, match="can't be reloaded in a fresh process") as caught:
        verify_export(target, folder, TEXTS, None, LIMIT, logits(bert))
    assert str(folder) in str(caught.value)
    assert "tokenizer.json" in str(caught.value)


def test_a_truncated_graph_is_rejected(bert, tmp_path):
    folder = copy_target(bert, "onnx", tmp_path)
    content = (folder / ONNX_FILE).read_bytes()
    (folder / ONNX_FILE).write_bytes(content[: len(content) // 2])
    with pytest.raises(ExportError, match="can't be reloaded in a fresh process") as caught:
        verify_export("onnx", folder, TEXTS, None, LIMIT, logits(bert))
    assert str(folder / ONNX_FILE) in str(caught.value)


class DataDependentModel(nn.Module):
    """A model with control flow that depends on input values, which no graph can represent."""

    def forward(self, input_ids, attention_mask):
        even = input_ids.sum() % 2 == 0
        return ModelOutput(logits=(input_ids if even else attention_mask).float())


def test_a_model_with_data_dependent_control_flow_is_rejected_and_nothing_is_written(tokenizer, tmp_path):
    with pytest.raises(ExportError, match="DataDependentModel can't be exported"):
        export_onnx(DataDependentModel(), tokenizer, tmp_path / "onnx", ["input_ids", "attention_mask"])
    assert not list((tmp_path / "onnx").iterdir())


# --- comparison of logits


def test_the_comparison_computes_differences_and_class_agreement():
    expected = np.array([[0.0, 1.0], [2.0, 1.5], [0.0, 3.0], [1.0, 0.0]], np.float32)
    found = expected + np.array([[0, 0], [0, 1], [0, -0.5], [0, 0]], np.float32)
    assert compare_logits("onnx", found, expected) == Parity("onnx", 4, 1.0, 1.5 / 8, 0.75)


@pytest.mark.parametrize(("same", "difference"), [(0.994, 0.1), (1.0, np.nan)])
def test_quantized_models_need_class_agreement_and_no_nan(same: float, difference: float):
    check_parity(Parity("onnx-int8", 1000, 3.0, 0.01, 0.995), Path("there"), quantized=True)
    with pytest.raises(ExportError, match=r"expected at least 99\.5% of its predictions to agree"):
        check_parity(Parity("onnx-int8", 1000, difference, 0.01, same), Path("there"), quantized=True)
