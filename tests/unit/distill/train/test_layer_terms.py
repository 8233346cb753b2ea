"""Tests of attention and relation terms, computed from the configured layers in memory and from a cache."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    BertTokenizerFast,
    LlamaConfig,
    LlamaForCausalLM,
    MobileBertConfig,
    MobileBertForMaskedLM,
)

from distill.cache import CacheReader, Dense, Identity, Relations, write_cache
from distill.cache.samples import build_samples
from distill.data.batches.encode import encode_samples
from distill.data.batches.token_blocks import LanguageBlocks
from distill.data.splits.examples import Examples
from distill.errors import InputError
from distill.losses.compose import weighted_sum
from distill.losses.config import DIVERGENCES, LayerSizes, LossConfig, match_layers
from distill.losses.features import attention_scores
from distill.losses.logits import DIVERGENCE_FUNCTIONS as FUNCTIONS
from distill.models.attention import capture_attention_vectors, read_attention_widths
from distill.models.layer_sizes import read_layer_sizes
from distill.student.build import build_student
from distill.teacher.online import OnlineTeacher
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from pipelines import distill
from pipelines.settings.commands.cache import KeepConfig
from pipelines.stages.cache.signals import make_signal
from support.commands import ROOT, rejection_of, small_run
from support.tiny_models import SIZES, VOCABULARY, build_model, make_rows, saved
from unit.distill.data.test_packing import FAMILIES as PACKED
from unit.distill.data.test_packing import build as build_packed

BOTH = LossConfig(kl=1, attention=0.5, relations=2, relation_heads=2)
SIZE = LayerSizes(SIZES["layers"], SIZES["hidden"], SIZES["heads"])


@pytest.fixture
def word_tokenizer() -> BertTokenizerFast:
    return BertTokenizerFast(vocab={word: i for i, word in enumerate(VOCABULARY)}, model_max_length=64)


@pytest.fixture
def rows(tokenizer):
    texts = [text for text, _ in make_rows(24, 3)]
    return encode_samples(tokenizer, Examples(texts, None, [i % 5 for i in range(24)]), 32)


def module(loss: LossConfig, signals, spec: str = "layers=2") -> DistillationModule:
    torch.manual_seed(0)
    student = build_student(build_model("bert"), spec)
    return DistillationModule(student, loss=loss, train=TrainConfig(), signals=signals, teacher_sizes=SIZE)


@pytest.mark.parametrize("family", ["bert", "roberta", "electra", "distilbert"])
def test_attention_scores_of_captured_queries_and_keys_give_the_models_attention(family, rows):
    model, batch = build_model(family), rows.collate(range(6), 0)
    model.set_attn_implementation("eager")
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad(), capture_attention_vectors(model) as caught:
        attended = model(**inputs, output_attentions=True).attentions
    padding = (batch["attention_mask"] == 0)[:, None, None]
    for (queries, keys, _), expected in zip(caught, attended, strict=True):
        scores = attention_scores(queries, keys, SIZES["heads"]).masked_fill(padding, -torch.inf)
        torch.testing.assert_close(scores.softmax(-1), expected, rtol=1e-4, atol=1e-5)


def test_the_terms_of_a_student_equal_to_its_teacher_are_0(rows):
    teacher = OnlineTeacher(build_model("bert"), BOTH.teacher_outputs)
    terms = module(BOTH, teacher, "teacher").compute_terms(rows.collate(range(8), 0))
    assert list(terms) == ["kl", "attention", "relations"]
    assert all(value.abs() < 1e-6 for value in terms.values())


def gradients(distiller: DistillationModule, term: Tensor) -> dict[str, Tensor]:
    named = dict(distiller.student.named_parameters())
    grads = torch.autograd.grad(term, list(named.values()), allow_unused=True, retain_graph=True)
    return {name: grad for name, grad in zip(named, grads, strict=True) if grad is not None}


def test_relations_train_the_last_student_layer_on_the_chosen_teacher_layer(rows):
    loss = LossConfig(kl=0, relations=1, relation_heads=2, relation_layer=3)
    teacher = OnlineTeacher(build_model("bert"), loss.teacher_outputs)
    distiller, batch = module(loss, teacher, "layers=2,hidden=16"), rows.collate(range(8), 0)
    grads = gradients(distiller, weighted_sum(loss, distiller.compute_terms(batch)))
    for name in ("query", "key", "value"):
        assert grads[f"bert.encoder.layer.1.attention.self.{name}.weight"].abs().max() > 0
    assert "bert.encoder.layer.1.attention.output.dense.weight" not in grads, "behind the vectors nothing counts"
    last = module(replace(loss, relation_layer=0), teacher, "layers=2,hidden=16").compute_terms(batch)["relations"]
    assert distiller.compute_terms(batch)["relations"] != last


def test_cached_vectors_give_the_terms_and_gradients_of_the_teacher_in_memory(rows, tmp_path):
    batch, teacher = rows.collate(range(8), 0), OnlineTeacher(build_model("bert"), BOTH.teacher_outputs)
    layers = match_layers(BOTH, LayerSizes(2, 32, 4), SIZE).attention_layers
    assert layers == (1, 3)
    identity = Identity("t", "t", (Dense(5), Relations(SIZES["hidden"], layers=layers)))
    write_cache(tmp_path / "c", identity, build_samples(rows, 0), teacher)
    online, offline = module(BOTH, teacher), module(BOTH, CacheReader(tmp_path / "c", identity))
    expected, found = online.compute_terms(batch), offline.compute_terms(batch)
    for name in ("attention", "relations"):
        torch.testing.assert_close(found[name], expected[name], rtol=5e-3, atol=1e-4)
        flat_gradients = [
            torch.cat([grad.flatten() for grad in gradients(*each).values()])
            for each in ((online, expected[name]), (offline, found[name]))
        ]
        assert torch.cosine_similarity(*flat_gradients, dim=0) > 0.999


def test_vectors_of_a_layer_missing_from_the_cache_are_rejected(rows, tmp_path):
    identity = Identity("t", "t", (Dense(5), Relations(SIZES["hidden"], layers=(0,))))
    teacher = OnlineTeacher(build_model("bert"), BOTH.teacher_outputs)
    write_cache(tmp_path / "c", identity, build_samples(rows, 0), teacher)
    with pytest.raises(InputError, match="expected queries, keys and values of layer 1"):
        module(BOTH, CacheReader(tmp_path / "c", identity)).compute_terms(rows.collate(range(8), 0))


def test_the_divergence_names_are_those_of_the_functions():
    assert tuple(FUNCTIONS) == DIVERGENCES


@pytest.mark.parametrize("name", DIVERGENCES)
def test_every_divergence_gives_a_positive_term_with_finite_gradients(name, rows):
    loss = LossConfig(divergence=name)
    distiller = module(loss, OnlineTeacher(build_model("bert"), loss.teacher_outputs))
    term = distiller.compute_terms(rows.collate(range(8), 0))["kl"]
    assert term > 0
    assert all(grad.isfinite().all() for grad in gradients(distiller, term).values())


@pytest.mark.parametrize(
    ("loss", "student", "message"),
    [
        (LossConfig(attention=1), LayerSizes(2, 16, 2), "expected as many heads as the teacher's 4, found 2"),
        (LossConfig(relations=1, relation_heads=5), LayerSizes(2, 16, 2), "expected a divisor of the widths 16 and 32"),
        (
            LossConfig(relations=1, relation_heads=2, relation_layer=5),
            SIZE,
            "expected a layer of the teacher from 1 to 4, found 5",
        ),
        (
            LossConfig(attention=1, layer_map="0:0"),
            SIZE,
            "a pair of layers for loss.attention, found only the embeddings",
        ),
    ],
)
def test_layers_that_cannot_be_compared_are_rejected(loss, student, message):
    with pytest.raises(InputError, match=message):
        match_layers(loss, student, SIZE)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"divergence": "kl"}, "loss.divergence: expected forward_kl, reverse_kl,"),
        ({"beta": 1.0}, "loss.beta: expected a share between 0 and 1"),
        ({"skew": 0.0}, "loss.skew: expected a share between 0 and 1"),
        ({"decoupled": (0.0, 0.0)}, "loss.decoupled: expected two weights"),
        ({"relation_heads": 0}, "loss.relation_heads, loss.relation_layer: expected at least 1"),
        ({"attention": 1.0, "layer_map": "dynamic"}, "loss.layer_map dynamic: expected loss.attention 0"),
        ({"attention": 1.0, "layer_map": "learned"}, "loss.layer_map learned: expected loss.attention 0"),
    ],
)
def test_meaningless_settings_are_rejected(settings, message):
    with pytest.raises(InputError, match=message):
        LossConfig(**settings)


@pytest.mark.slow
def test_a_run_with_attention_and_relation_terms_trains_from_its_cache(tmp_path: Path, word_tokenizer, data_folder):
    teacher_folder = saved(build_model("bert"), word_tokenizer, tmp_path / "teacher")
    flags = ("--loss.relations", "1", "--loss.relation_heads", "4", "--loss.attention", "1", "--epochs", "1")
    distill.main(
        small_run(teacher_folder, data_folder, tmp_path / "run", *flags, "--student", "layers=2", "--until", "distill")
    )
    assert read_layer_sizes(AutoConfig.from_pretrained(teacher_folder)) == SIZE
    (log,) = (tmp_path / "run" / "distill").glob("*/logs/attempt-0/metrics.csv")
    assert "train/relations_gradient_share" in log.read_text()


def test_a_run_with_different_numbers_of_heads_is_rejected(tmp_path, word_tokenizer, data_folder, monkeypatch, capsys):
    teacher_folder = saved(build_model("bert"), word_tokenizer, tmp_path / "teacher")
    flags = ("--loss.attention", "1", "--student", "layers=2,hidden=16,heads=2")
    message = rejection_of(
        distill, small_run(teacher_folder, data_folder, tmp_path / "run", *flags), monkeypatch, capsys
    )
    assert "expected as many heads as the teacher's 4, found 2" in message
    assert not (tmp_path / "run" / "teacher").exists()


# --- grouped-query attention, and bottleneck blocks narrower than the hidden states


def grouped_query_decoder(layers: int = 3, **changes: int) -> LlamaForCausalLM:
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24} | changes
    torch.manual_seed(layers)
    common = {"vocab_size": len(VOCABULARY), "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **common, **sizes)).eval()


def narrow_bottleneck_config() -> MobileBertConfig:
    blocks = {"intra_bottleneck_size": 12, "embedding_size": 12, "intermediate_size": 24}
    return MobileBertConfig(hidden_size=48, num_attention_heads=4, num_hidden_layers=2, vocab_size=60, **blocks)


@pytest.mark.parametrize("family", [*PACKED, "mobilebert"])
def test_the_widths_of_queries_keys_and_values_follow_from_the_config(family):
    model = MobileBertForMaskedLM(narrow_bottleneck_config()) if family == "mobilebert" else build_packed(family)
    with torch.no_grad(), capture_attention_vectors(model) as caught:
        model(input_ids=torch.tensor([[5, 6, 7]]))
    for vectors in caught:
        assert tuple(each.shape[-1] for each in vectors) == read_attention_widths(model.config)


@pytest.mark.parametrize(
    ("heads", "config", "widths"),
    [(16, grouped_query_decoder().config, "8 and 16"), (16, narrow_bottleneck_config(), "12"), (24, SIZE, "32")],
)
def test_relation_heads_that_do_not_divide_the_attention_widths_are_rejected(heads, config, widths):
    sizes = config if isinstance(config, LayerSizes) else read_layer_sizes(config)
    with pytest.raises(InputError, match=f"expected a divisor of the widths {widths} of queries, keys and values"):
        match_layers(LossConfig(kl=0, relations=1, relation_heads=heads), sizes, sizes)


def test_cached_vectors_of_a_grouped_query_teacher_give_the_same_terms_as_online(tmp_path):
    loss = LossConfig(kl=0, attention=1, relations=1, relation_heads=4)
    teacher, rng = grouped_query_decoder(), np.random.default_rng(0)
    blocks = LanguageBlocks([rng.integers(5, 60, length) for length in (9, 7, 9, 3)])
    batch, wanted = (
        blocks.collate(range(4), 0),
        match_layers(loss, read_layer_sizes(grouped_query_decoder(2).config), read_layer_sizes(teacher.config)),
    )
    keep = KeepConfig(signals="relations", vectors=",".join(map(str, wanted.attention_layers)))
    identity = Identity("t", "t", (make_signal("relations", "causal-lm", keep, teacher.config, 0),))
    online = OnlineTeacher(teacher, loss.teacher_outputs)
    write_cache(tmp_path / "c", identity, build_samples(blocks, 0), online)
    terms = []
    for signals in (online, CacheReader(tmp_path / "c", identity)):
        sizes = read_layer_sizes(teacher.config)
        distiller = DistillationModule(
            grouped_query_decoder(2), loss=loss, train=TrainConfig(), signals=signals, teacher_sizes=sizes
        )
        terms.append(distiller.compute_terms(batch))
    torch.testing.assert_close(terms[1], terms[0], rtol=1e-2, atol=1e-4)
    assert terms[0]["relations"] > 0


def test_the_docs_name_every_divergence():
    text = (ROOT / "docs" / "reference" / "objectives.md").read_text()
    rows = text[text.index("| `divergence` |") :].split("\n\n")[0].splitlines()[2:]
    assert tuple(name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])) == DIVERGENCES
