"""Tests factorized embedding tables: the approximation error, and that pruning, saving and exporting still work."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from compress.export.common.huggingface import input_names
from compress.export.onnx.fuse import fuse_operators
from compress.export.onnx.graph import ONNX_FILE, OnnxModel, export_onnx
from compress.export.onnx.int8 import products_saturate, quantize_int8
from compress.prune.budget import Budget
from compress.prune.config import PruneConfig
from compress.prune.importance.gates import Gates
from compress.prune.vocabulary.vocabulary import choose_tokens, count_tokens, prune_vocabulary
from distill.checkpoint.custom_models import embedding_rank, is_pruned, load_model_folder, save_model_folder
from distill.errors import InputError
from distill.losses.config import LossConfig
from distill.slicing import Shape, factorize_embeddings, find_axes, mask_model, prune
from distill.slicing.factorize import weigh_tokens
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from pipelines.runs.console import Console
from pipelines.runs.stage import Artefact, Run
from pipelines.settings.commands.distill import DataConfig, DistillConfig, StudentConfig, TeacherConfig
from pipelines.settings.facts import Facts
from pipelines.settings.rules.table import check_rules
from pipelines.stages.prepare.data import data_stage, read_data
from pipelines.stages.prune.start import pruning_start_stage
from support.plans import plan_of
from support.tiny_families import auto_class, build, logits, padded_batch, random_shape
from support.tiny_models import LABELS, VOCABULARY, build_model, make_rows, saved

RANK = 6
FAMILIES = (
    *("bert", "roberta", "distilbert", "electra", "electra-projected", "modernbert"),
    *("llama", "llama-classifier"),  # untied output layer
)
DIFFERENT = ("bert", "distilbert", "electra-projected", "modernbert", "llama")  # the others share code with these
TEXTS = [text for text, _ in make_rows(30, seed=7)]


def table_of(model: PreTrainedModel) -> Any:
    return model.get_input_embeddings()


def rows_of(model: PreTrainedModel) -> Tensor:
    """Returns the effective embedding of each token, float64 [vocabulary, width]."""
    table = table_of(model)
    weight = table.weight.detach().double()
    return weight @ table.projection.weight.detach().double().T if embedding_rank(model) else weight


def low_rank_model(family: str, rank: int = RANK) -> PreTrainedModel:
    """Builds a model whose embedding table is full-size but has the given rank."""
    model = build(family)
    weight = table_of(model).weight
    seeded = torch.Generator().manual_seed(rank)
    left, right = (torch.randn(*shape, generator=seeded) for shape in ((len(weight), rank), (rank, weight.shape[1])))
    weight.data.copy_(0.2 * left @ right / rank**0.5)
    return model


def assert_same(found: PreTrainedModel, expected: PreTrainedModel, batch: dict[str, Tensor] | None = None) -> None:
    batch = padded_batch(expected) if batch is None else batch
    theirs = logits(expected, batch)
    torch.testing.assert_close(logits(found, batch), theirs, rtol=0, atol=1e-5 * max(1, float(theirs.abs().max())))


@pytest.mark.parametrize("family", FAMILIES)
def test_factorizing_a_table_of_that_rank_keeps_the_logits(family: str):
    model = low_rank_model(family)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    small = factorize_embeddings(model, RANK)
    assert_same(small, model)
    table, old = table_of(small), table_of(model)
    assert table.weight.shape == (len(old.weight), RANK)
    assert (table.padding_idx, table.num_embeddings) == (old.padding_idx, len(old.weight))
    saved_numbers = old.weight.numel() - RANK * sum(old.weight.shape)
    assert small.num_parameters() == model.num_parameters() - saved_numbers
    assert is_pruned(small)
    assert not is_pruned(model)
    for parameter in small.parameters():
        parameter.data += 1
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_the_squared_error_is_the_tail_of_the_squared_singular_values():
    model = build("bert")
    whole = rows_of(model)
    values = torch.linalg.svdvals(whole)
    lost = []
    for rank in (1, 2, 5, 11, 20, 27):
        approximation = rows_of(factorize_embeddings(model, rank))
        assert torch.linalg.matrix_rank(approximation, rtol=1e-5) == rank
        lost.append(float((approximation - whole).square().sum()))
        assert lost[-1] == pytest.approx(float(values[rank:].square().sum()), rel=1e-4)
    assert lost == sorted(lost, reverse=True)
    assert lost[0] > 2 * lost[-1] > 0


def test_frequent_tokens_are_approximated_better_than_rare_ones():
    model = build("bert")
    whole = rows_of(model)
    counts = np.random.default_rng(2).zipf(1.3, len(whole)).clip(max=10**6).astype(np.int64)
    counts[::3] = 0
    weights = weigh_tokens(counts, len(whole))
    weighted, plain = (
        rows_of(factorize_embeddings(model, RANK, token_counts)) - whole for token_counts in (counts, None)
    )
    values = torch.linalg.svdvals(weights.sqrt()[:, None] * whole)
    least = float(values[RANK:].square().sum())
    assert float((weights[:, None] * weighted.square()).sum()) == pytest.approx(least, rel=1e-4)
    assert float((weights[:, None] * plain.square()).sum()) > 1.05 * least
    assert weighted.square().sum() > plain.square().sum()
    top = counts.argmax()
    assert weighted[top].norm() < 0.1 * plain[top].norm()


def test_unseen_tokens_share_the_rank_that_seen_tokens_leave():
    model = build("bert")
    counts = np.zeros(len(VOCABULARY), np.int64)
    counts[[7, 9]] = 50  # two tokens use two directions; the others share the rest
    approximation, whole = rows_of(factorize_embeddings(model, RANK, counts)), rows_of(model)
    torch.testing.assert_close(approximation[[7, 9]], whole[[7, 9]], rtol=0, atol=1e-3)
    assert (approximation - whole).square().sum() < 0.95 * whole.square().sum()


def test_factorizing_twice_equals_factorizing_once_to_the_smaller_rank():
    model = build("bert")
    twice = factorize_embeddings(factorize_embeddings(model, 20), 5)
    torch.testing.assert_close(rows_of(twice), rows_of(factorize_embeddings(model, 5)), rtol=0, atol=1e-5)
    assert table_of(twice).weight.shape[1] == embedding_rank(twice) == 5


def test_a_saved_factorized_model_loads_with_its_rank(tmp_path: Path):
    """A process without this package loads it too: `test_model_folder`."""
    models = {family: factorize_embeddings(build(family), RANK) for family in DIFFERENT}
    axes = find_axes(models["bert"])
    models["bert-cut"] = prune(models["bert"], axes, random_shape(axes, 3, ("heads", "ffn"), (0, 2), largest=0.7))
    for name, model in models.items():
        save_model_folder(model, tmp_path / name)
        again = load_model_folder(tmp_path / name, auto_class(model))
        assert embedding_rank(again) == RANK
        assert_same(again, model)


@pytest.mark.parametrize("family", DIFFERENT)
def test_a_sliced_factorized_model_computes_the_masked_models_logits(family: str):
    model = factorize_embeddings(build(family), RANK)
    axes = find_axes(model)
    assert {axis.name for axis in axes} == {axis.name for axis in find_axes(build(family))}
    table = next(name for name, weight in model.named_parameters() if weight is table_of(model).weight)
    slots = {(slot.parameter, slot.dim): (axis.name, slot.role) for axis in axes for slot in axis.slots}
    assert slots[table, 0] == ("vocabulary", "in")
    projection = table.replace("weight", "projection.weight")
    assert slots.get((projection, 0)) == (None if family == "electra-projected" else ("hidden", "out"))
    assert not {(table, 1), (projection, 1)} & slots.keys()
    shape = random_shape(axes, len(family), ("heads", "ffn"), (1, 2), largest=0.6)
    shape = Shape(shape.layers, {**shape.kept, "hidden": torch.arange(1, 32, 2)})
    reference, pruned = mask_model(model, axes, shape), prune(model, axes, shape)
    assert embedding_rank(pruned) == RANK
    assert_same(pruned, reference)
    gap = (logits(model, padded_batch(model)) - logits(reference, padded_batch(model))).abs().max()
    assert gap > 0.01, "the mask does nothing"


@pytest.mark.parametrize("family", ["bert", "electra-projected"])
def test_factorizing_and_uneven_pruning_commute(family: str):
    model = low_rank_model(family)
    axes = find_axes(model)
    shape = random_shape(axes, 5, ("heads", "ffn"), (0, 2), largest=0.7)
    shape = Shape(shape.layers, {**shape.kept, "hidden": torch.arange(8, 32)})  # as wide as ELECTRA's embeddings
    once = prune(model, axes, shape)
    small = factorize_embeddings(once, RANK)
    assert_same(small, once)
    first = factorize_embeddings(model, RANK)
    assert_same(small, prune(first, find_axes(first), shape))
    axes = find_axes(small)
    whole, factored = ({slot.parameter for slot in model_axes[0].slots} for model_axes in (find_axes(once), axes))
    assert factored == {name.replace("word_embeddings.weight", "word_embeddings.projection.weight") for name in whole}
    further = random_shape(axes, 6, ("heads", "ffn", "hidden"), (1,), largest=0.9)
    assert_same(prune(small, axes, further), mask_model(small, axes, further))


def test_pruning_the_width_below_the_rank_merges_the_factors():
    model = factorize_embeddings(build("bert"), 12)
    axes = find_axes(model)
    narrow = Shape((0, 1, 2), {"hidden": torch.arange(0, 32, 3)})  # width 11, less than the rank
    pruned = prune(model, axes, narrow)
    assert embedding_rank(pruned) == 0
    assert table_of(pruned).weight.shape == (len(VOCABULARY), 11)
    assert_same(pruned, mask_model(model, axes, narrow))
    even = Shape((0, 1, 2), {"hidden": torch.arange(8)} | {f"layers.{i}.heads": torch.tensor([1]) for i in range(3)})
    assert type(prune(model, axes, even, uniform=True)) is type(build("bert"))
    with pytest.raises(InputError, match="table of 12 columns and a projection"):
        prune(model, axes, Shape((0, 1)), uniform=True)


def test_gates_of_a_factorized_model_match_its_pruned_model():
    model = factorize_embeddings(build("bert"), RANK)
    axes = find_axes(model)
    shape = Shape((0, 1, 2), {"hidden": torch.arange(1, 32, 2)})
    gates = Gates(model, axes)
    gates.set(gates.make_mask(shape.kept))
    expected = logits(prune(model, axes, shape), padded_batch(model))
    with gates:
        torch.testing.assert_close(logits(model, padded_batch(model)), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "electra-projected"])
def test_vocabulary_pruning_before_or_after_factorizing_keeps_the_logits(family: str, tokenizer):
    model = low_rank_model(family)
    counts = count_tokens(tokenizer, TEXTS)
    ids = choose_tokens(tokenizer, counts, coverage=1.0, unseen=1.0)
    assert len(ids) < len(VOCABULARY)
    after, words = prune_vocabulary(factorize_embeddings(model, RANK, counts), tokenizer, ids)
    before = factorize_embeddings(prune_vocabulary(model, tokenizer, ids)[0], RANK, counts[ids])
    inputs = [dict(t(TEXTS[:6], padding=True, return_tensors="pt")) for t in (tokenizer, words)]
    for batch in inputs:
        batch.pop("token_type_ids")
    expected = logits(model, inputs[0])
    for small in (after, before):
        assert table_of(small).weight.shape == (len(ids), RANK)
        assert table_of(small).padding_idx == table_of(model).padding_idx
        torch.testing.assert_close(logits(small, inputs[1]), expected, atol=1e-4, rtol=1e-4)
    axes = find_axes(after)
    rows = torch.arange(0, len(ids), 2)
    halved = prune(after, axes, Shape((0, 1, 2), {"vocabulary": rows}))
    torch.testing.assert_close(table_of(halved).weight, table_of(after).weight[rows])


def test_freezing_and_resizing_apply_to_the_factorized_table():
    model = factorize_embeddings(build_model("bert"), RANK)
    train = TrainConfig(freeze_embeddings=True)
    DistillationModule(model, loss=LossConfig(kl=0, ce=1), train=train, teacher_sizes=(4, 32))
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {"bert.embeddings.word_embeddings.weight"}
    batch = padded_batch(model)
    before, old = logits(model, batch), table_of(model).weight.clone()
    model.resize_token_embeddings(len(VOCABULARY) + 9)
    assert table_of(model).weight.shape == (len(VOCABULARY) + 9, RANK)
    assert torch.equal(table_of(model).weight[: len(VOCABULARY)], old)
    torch.testing.assert_close(logits(model, batch), before)


def test_dtype_training_mode_and_labels_are_preserved():
    model = build("bert").bfloat16().train()
    small = factorize_embeddings(model, RANK)
    assert {parameter.dtype for parameter in small.parameters()} == {torch.bfloat16}
    assert small.training
    assert small.config.id2label == model.config.id2label


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, tokenizer) -> tuple[PreTrainedModel, Path, Path]:
    """A factorized model, its graph, and the graph with fused operators."""
    model = factorize_embeddings(build_model("bert", num_hidden_layers=2), RANK, count_tokens(tokenizer, TEXTS))
    whole, joined = (tmp_path_factory.mktemp(name) / ONNX_FILE for name in ("whole", "joined"))
    export_onnx(model, tokenizer, whole.parent, input_names(model.config))
    assert fuse_operators(whole, joined)["Attention"] == 2
    return model, whole, joined


@pytest.mark.parametrize("reduce_range", sorted({products_saturate(), True}))
def test_onnx_logits_match_and_int8_quantizes_both_factors(reduce_range, exported, tmp_path: Path, tokenizer):
    (model, whole, joined), small = exported, tmp_path / ONNX_FILE
    quantize_int8(joined, small, reduce_range=reduce_range)
    batch = tokenizer(TEXTS, padding=True, return_tensors="np")
    with torch.no_grad():
        expected = model(**{name: torch.from_numpy(value) for name, value in batch.items()}).logits.numpy()
    for path in (whole, joined):
        np.testing.assert_allclose(OnnxModel(path.parent, threads=1)(batch), expected, rtol=1e-4, atol=1e-4)
    found = OnnxModel(small.parent, threads=1)(batch)
    assert np.abs(found - expected).mean() < expected.std() / 3
    assert (found.argmax(-1) == expected.argmax(-1)).mean() > 0.9
    weights = {tuple(w.dims): w.data_type for w in onnx.load(small).graph.initializer if len(w.dims) == 2}
    assert weights[len(VOCABULARY), RANK] == onnx.TensorProto.INT8
    assert weights[RANK, 32] == onnx.TensorProto.INT8
    assert (len(VOCABULARY), 32) not in weights


def test_invalid_ranks_models_and_counts_are_rejected():
    model = build("bert")
    for rank in (0, -3, 32, 99):
        with pytest.raises(InputError, match=rf"rank: expected 1 to 31.*found {rank}"):
            factorize_embeddings(model, rank)
    largest_rank = (len(VOCABULARY) * 32 - 1) // (len(VOCABULARY) + 32)
    with pytest.raises(
        InputError, match=rf"expected at most {largest_rank}, found {largest_rank + 1}.*nothing would be saved"
    ):
        factorize_embeddings(model, largest_rank + 1)
    small = factorize_embeddings(model, largest_rank)
    assert small.num_parameters() < model.num_parameters()
    now = f"{largest_rank * (len(VOCABULARY) + 32):,}"
    with pytest.raises(InputError, match=rf"at most {largest_rank - 1}, found {largest_rank}.*{now} now"):
        factorize_embeddings(small, largest_rank)
    for family in ("bert-words", "gpt2", "qwen2"):
        with pytest.raises(InputError, match=r"token embedding that isn't shared, found it shared by .*untie"):
            factorize_embeddings(build(family), RANK)
    with pytest.raises(InputError, match=r"plain nn.Embedding.*ScaledWordEmbedding"):
        factorize_embeddings(build("gemma", tie_word_embeddings=False), RANK)
    with pytest.raises(InputError, match=r"one for each of .* tokens, found \[7\]"):
        factorize_embeddings(model, RANK, np.ones(7, np.int64))
    with pytest.raises(InputError, match="found -1: errors"):
        factorize_embeddings(model, RANK, np.full(len(VOCABULARY), -1))
    with pytest.raises(InputError, match=r"prune.embedding_rank: expected at least 0, found -1"):
        PruneConfig(embedding_rank=-1)


@pytest.fixture
def config(tmp_path: Path, data_folder: Path) -> DistillConfig:
    return DistillConfig(
        output=str(tmp_path / "run"),
        teacher=TeacherConfig(model=str(tmp_path / "teacher")),
        student=StudentConfig(spec="teacher"),
        data=DataConfig(path=str(data_folder)),
        prune=PruneConfig(embedding_rank=RANK, max_split_share=1.0),
    )


def test_the_start_stage_prunes_the_vocabulary_and_factorizes_the_table(
    config: DistillConfig, tmp_path: Path, tokenizer
):
    whole = build_model("bert")
    saved(whole, tokenizer, tmp_path / "teacher" / "model")
    rows = "".join(f"{text},{label}\n" for text, label in make_rows(20, seed=1))  # too few to use every token
    (Path(config.data.path) / "train.csv").write_text(f"text,label\n{rows}")
    run = Run(Path(config.output), 0, Console(quiet=True))
    teacher = Artefact("teacher", tmp_path / "teacher", "a" * 64, {})
    data = data_stage(run, config.data)
    start = pruning_start_stage(run, plan_of(config), data, teacher)
    model = load_model_folder(start.folder / "model")
    token_ids = np.load(start.folder / "token_ids.npy")
    assert table_of(model).weight.shape == (len(token_ids), RANK)
    assert model.config.vocab_size == len(token_ids) < len(VOCABULARY)
    pruned = prune_vocabulary(whole, tokenizer, token_ids)[0]
    counts = count_tokens(tokenizer, read_data(data).train.texts)
    torch.testing.assert_close(rows_of(model), rows_of(factorize_embeddings(pruned, RANK, counts[token_ids])))
    assert json.loads((start.folder / "manifest.json").read_text())["config"]["embedding_rank"] == RANK
    assert model.config.num_labels == len(LABELS)


def test_an_embedding_rank_with_a_uniform_budget_is_rejected(config: DistillConfig):
    config = replace(config, budget=Budget(speedup="2", uniform=True))
    with pytest.raises(InputError, match=r"prune.embedding_rank: expected 0 with budget.uniform, found 6"):
        check_rules(Facts(config, 1))
