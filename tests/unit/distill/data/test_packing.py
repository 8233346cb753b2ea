"""Tests packed rows: each document is in one row, with the losses and gradients that it has alone."""

from itertools import permutations

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from distill.data.batches.batches import EvalBatches, TrainBatches
from distill.data.batches.packing import PackedRows, best_fit, find_padding_id, text_documents
from distill.data.batches.token_blocks import LanguageBlocks
from distill.data.masking.config import MaskConfig
from distill.data.masking.masks import MaskedBlocks
from distill.errors import InputError
from distill.losses.compose import weighted_sum
from distill.losses.config import LossConfig
from distill.losses.logits import IGNORED
from distill.models.layer_sizes import read_layer_sizes
from distill.models.packed_inputs import build_packed_inputs, check_family_packing
from distill.teacher.online import OnlineTeacher
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from support.tiny_models import FILLERS, draw_weights, word_tokenizer
from support.tolerances import assert_as_exact

WORDS, MASK = 60, 4
COMMON = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
COMMON |= {"intermediate_size": 24, "max_position_embeddings": 64}
COMMON |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = COMMON | {"num_key_value_heads": 1, "head_dim": 8}
BOTH = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}

FAMILIES = {
    "llama": ("LlamaForCausalLM", GROUPED),
    "mistral": ("MistralForCausalLM", GROUPED | {"sliding_window": 4}),
    "qwen2": ("Qwen2ForCausalLM", GROUPED),
    "qwen2-window": (
        "Qwen2ForCausalLM",
        GROUPED | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3ForCausalLM", GROUPED),
    "gemma": ("GemmaForCausalLM", GROUPED),
    "gemma3": ("Gemma3ForCausalLM", GROUPED | BOTH),
    "gpt2": ("GPT2LMHeadModel", COMMON),
    "opt": ("OPTForCausalLM", COMMON | {"ffn_dim": 24, "word_embed_proj_dim": 16}),
    "bert": ("BertForMaskedLM", COMMON),
    "roberta": ("RobertaForMaskedLM", COMMON | {"pad_token_id": 3, "max_position_embeddings": 68}),
    "distilbert": ("DistilBertForMaskedLM", COMMON | {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}),
    "modernbert": ("ModernBertForMaskedLM", COMMON | {"cls_token_id": 1, "sep_token_id": 2, "local_attention": 6}),
}
MASKED = ("bert", "roberta", "distilbert", "modernbert")


def build(family: str, attention: str = "sdpa") -> PreTrainedModel:
    name, settings = FAMILIES[family]
    kind = getattr(transformers, name)
    config = kind.config_class(**settings)
    config._attn_implementation = attention
    torch.manual_seed(7)
    model = kind(config)
    draw_weights(model)
    return model.eval()


def lengths_of(count: int, longest: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, longest + 1, count)


def documents(lengths, seed: int = 1) -> LanguageBlocks:
    rng = np.random.default_rng(seed)
    return LanguageBlocks([rng.integers(5, WORDS, length) for length in lengths])


def source(family: str, lengths) -> LanguageBlocks | MaskedBlocks:
    plain = documents(lengths)
    return MaskedBlocks(plain, MaskConfig(rate=0.4), MASK, WORDS, tuple(range(5))) if family in MASKED else plain


def losses(model: PreTrainedModel, inputs: dict, labels: Tensor) -> Tensor:
    """Returns the loss of every labelled token, in the order of the batch."""
    expected = labels != IGNORED
    return torch.nn.functional.cross_entropy(model(**inputs).logits[expected], labels[expected], reduction="none")


def losses_alone(model: PreTrainedModel, data: LanguageBlocks | MaskedBlocks, rows: PackedRows) -> Tensor:
    """Returns the losses of each document in a separate batch, in the order of the rows."""
    document_losses = []
    for document in np.concatenate(rows.rows):
        one = data.collate([document], 0)
        document_losses.append(losses(model, {"input_ids": one["input_ids"]}, one["labels"]))
    return torch.cat(document_losses)


def gradients(model: PreTrainedModel, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.sum().backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


# --- assignment of documents to rows


@pytest.mark.parametrize(("count", "longest", "length"), [(1, 9, 9), (300, 40, 40), (300, 40, 100), (200, 1, 7)])
def test_every_document_is_packed_once_and_no_row_is_too_long(count, longest, length):
    sizes = lengths_of(count, longest)
    rows = best_fit(sizes, length, seed=3)
    assert sorted(np.concatenate(rows).tolist()) == list(range(count))
    assert max(sizes[row].sum() for row in rows) <= length
    assert -(-sizes.sum() // length) <= len(rows) <= count


def fewest_rows(sizes, length: int) -> int:
    """Returns the number of rows of the best packing, by trying every order of the documents."""
    best = len(sizes)
    for order in permutations(sizes):
        rows, room = 0, 0
        for size in order:
            if size > room:
                rows, room = rows + 1, length
            room -= size
        best = min(best, rows)
    return best


def test_packing_is_close_to_optimal():
    for seed in range(25):
        sizes = lengths_of(6, 10, seed)
        assert len(best_fit(sizes, 10, seed)) <= fewest_rows(sizes.tolist(), 10) + 1
    sizes = lengths_of(3000, 60)
    assert sizes.sum() / (len(best_fit(sizes, 128)) * 128) > 0.99


def test_a_document_goes_to_the_fullest_row_with_room():
    rows = best_fit([7, 5, 3], 10)
    assert sorted(sorted(row.tolist()) for row in rows) == [[0, 2], [1]]


def test_a_packing_depends_only_on_the_seed_and_matches_the_first_version():
    sizes = lengths_of(50, 20)
    packings = [[row.tolist() for row in best_fit(sizes, 40, seed)] for seed in (0, 0, 1)]
    assert packings[0] == packings[1] != packings[2]
    # Caches on disk outlive the code: this is the packing of the first version.
    assert [row.tolist() for row in best_fit([4, 1, 3, 2, 4, 2], 8, 5)] == [[3, 5, 1, 2], [4, 0]]


@pytest.mark.parametrize(
    ("sizes", "seed", "message"),
    [
        ([3, 9], 0, "expected documents of 1 to 8 tokens, found 9 in document 1: it would not fit into a row"),
        ([3, 0], 0, "expected documents of 1 to 8 tokens, found 0 in document 1"),
        ([3], -1, "packing seed: expected 0 or more, found -1"),
    ],
)
def test_documents_that_fit_no_row_and_negative_seeds_are_rejected(sizes, seed, message):
    with pytest.raises(InputError, match=message):
        best_fit(sizes, 8, seed)


# --- batches


def test_labels_and_positions_do_not_cross_document_boundaries():
    blocks = LanguageBlocks([np.array([5, 6, 7]), np.array([8]), np.array([9, 0]), np.array([11, 12])])
    rows = PackedRows(blocks, [np.array([2, 0]), np.array([1]), np.array([3, 1])])
    assert rows.lengths.tolist() == [5, 1, 3]
    batch = rows.collate([1, 0, 2], pad_id=0)
    none = IGNORED
    assert batch["input_ids"].tolist() == [[8, 0, 0, 0, 0], [9, 0, 5, 6, 7], [11, 12, 8, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 0, 0, 0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 0, 0, 0, 0], [0, 1, 0, 1, 2], [0, 1, 0, 0, 0]]
    assert batch["documents"].tolist() == [[1, 0, 0, 0, 0], [1, 1, 2, 2, 2], [1, 1, 2, 0, 0]]
    labels = [[none] * 5, [0, none, 6, 7, none], [12, none, none, none, none]]
    assert batch["labels"].tolist() == labels, "an id that also pads is a label where it is a token"
    assert {value.dtype for value in batch.values()} == {torch.int64}


def test_the_mask_of_a_document_is_independent_of_its_row():
    plain = source("bert", lengths_of(20, 12))
    for seed in (0, 1):
        rows = PackedRows.build(plain, 30, seed)
        for epoch in (0, 1):
            batch = rows.collate(range(len(rows)), 0, epoch)
            for index, row in enumerate(rows.rows):
                for number, document in enumerate(row, 1):
                    alone = plain.collate([document], 0, epoch)
                    in_document = batch["documents"][index] == number
                    for name, value in alone.items():
                        assert torch.equal(batch[name][index, in_document], value[0]), name


def test_batches_contain_every_document_once():
    rows = PackedRows.build(documents(lengths_of(60, 12)), 20, 2)
    wanted = sorted(ids.tolist() for ids in rows.documents.input_ids)
    for batches in (TrainBatches(rows, 4, 0, seed=1), EvalBatches(rows, 4, 0)):
        packed_ids = [
            batch["input_ids"][i][batch["documents"][i] == number].tolist()
            for batch in batches
            for i in range(len(batch["labels"]))
            for number in range(1, int(batch["documents"][i].max()) + 1)
        ]
        assert sorted(packed_ids) == wanted


# --- packed rows in a model

CASES = [(family, "sdpa") for family in FAMILIES]
CASES += [(family, "eager") for family in ("llama", "gemma3", "gpt2", "bert", "modernbert")]


@pytest.mark.parametrize(("family", "attention"), CASES)
def test_a_packed_document_has_the_losses_and_gradients_that_it_has_alone(family, attention):
    model = build(family, attention)
    data = source(family, [9, 4, 12, 1, 7, 2, 11, 5])
    rows = PackedRows.build(data, 24, 1)
    batch = rows.collate(range(len(rows)), 0)
    assert (batch["attention_mask"] == 0).any(), "padding is part of the test"
    packed = losses(model, build_packed_inputs(model, batch), batch["labels"])
    packed_gradients = gradients(model, packed)
    single = losses_alone(model, data, rows)
    wanted = gradients(model, single)
    reference = build(family, attention).double()
    exact = losses_alone(reference, data, rows)
    assert_as_exact(packed, single, exact, name="losses")
    slopes = gradients(reference, exact)
    scale = max(float(slope.abs().max()) for slope in slopes.values())  # a key's bias has no effect: its terms cancel
    for name, value in wanted.items():
        assert_as_exact(packed_gradients[name], value, slopes[name], scale=scale, name=name)
    # Without boundaries the results differ by more than the tolerance: a mistake would be detected.
    joined = {name: batch[name] for name in ("input_ids", "attention_mask")}
    other = losses(model, joined, batch["labels"])
    assert (other - single).abs().max() > 0.05
    leaked_gradients = gradients(model, other)
    assert (
        max(float((leaked_gradients[n] - v).abs().max() / max(float(v.abs().max()), 1e-3)) for n, v in wanted.items())
        > 0.02
    )


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_position_ids_alone_do_not_keep_documents_apart(family):
    """With the default settings of a config, transformers does not detect packed positions."""
    model = build(family)
    batch = PackedRows(documents([9, 9, 7]), [np.array([0, 2]), np.array([1, 2])]).collate([0, 1], 0)
    with torch.no_grad():
        bare = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits[:, 9:]
        separated = model(**build_packed_inputs(model, batch)).logits[:, 9:]
    assert (bare[0] - bare[1]).abs().max() > 0.01
    assert torch.equal(separated[0], separated[1])


def test_families_that_can_be_packed_pass_the_check():
    for family in FAMILIES:
        model = build(family).train()
        check_family_packing(model)
        assert model.training
    check_family_packing(build("llama").to(torch.bfloat16))


REJECTED = {
    "MambaForCausalLM": (
        {},
        "found linear_attention: such a layer's state would carry over from one document to the next",
    ),
    "Lfm2ForCausalLM": ({"layer_types": ["conv", "full_attention"]}, "full_attention or sliding_attention, found conv"),
    "MobileBertForMaskedLM": (
        {"embedding_size": 16, "intra_bottleneck_size": 16},
        "found trigram_input: the last token of a document would be part of the next one's first",
    ),
    "Gemma3ForCausalLM": (BOTH | {"use_bidirectional_attention": True}, "whose window is defined in another way"),
    "T5ForConditionalGeneration": ({}, "found a model that computes them itself"),
    "BloomForCausalLM": ({}, "expected a decoder or an encoder that takes position_ids"),
    "DebertaV2ForMaskedLM": ({}, "found no module with the attribute: its attention mask is unknown"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_families_that_mix_documents_are_rejected(name):
    changes, message = REJECTED[name]
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**(COMMON | changes)))
    for call in (
        check_family_packing,
        lambda model: build_packed_inputs(model, PackedRows.build(documents([3]), 8).collate([0], 0)),
    ):
        with pytest.raises(InputError) as caught:
            call(model)
        assert str(caught.value).startswith(f"packing: {name}: expected ")
        assert message in str(caught.value)
        assert str(caught.value).endswith("train it unpacked")


class LeakyModel(transformers.LlamaForCausalLM):
    """A model that adds to every token the preceding one, which no config reveals."""

    def forward(self, input_ids=None, position_ids=None, **inputs):
        embedded = self.get_input_embeddings()(input_ids)
        return super().forward(
            inputs_embeds=embedded + torch.roll(embedded, 1, 1).index_fill(1, torch.tensor([0]), 0.0),
            position_ids=position_ids,
            **inputs,
        )


def test_the_check_detects_a_leak_that_no_config_reveals():
    model = LeakyModel(transformers.LlamaConfig(**GROUPED))
    with pytest.raises(InputError, match="packing: LeakyModel: expected the output that a document gets alone"):
        check_family_packing(model)


def test_attention_kernels_without_masks_are_rejected():
    model = build("llama")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(InputError, match="expected attention eager or sdpa, found flash_attention_2"):
        build_packed_inputs(model, PackedRows.build(documents([3, 4]), 8).collate([0], 0))


# --- texts


def decoder_tokenizer(bos: bool = False, **tokens: str) -> PreTrainedTokenizerFast:
    words = {word: i for i, word in enumerate(["[UNK]", "<eos>", "<bos>", *FILLERS])}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
        tokens["bos_token"] = "<bos>"
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", **tokens)


def test_long_texts_are_split_into_documents_and_dropped_tokens_are_counted():
    texts = ["", FILLERS[0], " ".join(FILLERS[:3]), " ".join(FILLERS[:8])]
    plain = text_documents(decoder_tokenizer(eos_token="<eos>"), texts, 4)
    split_rows = [row.tolist() for row in plain.input_ids]
    assert split_rows == [[3, 1], [3, 4, 5, 1], [3, 4, 5, 6], [7, 8, 9, 10]]
    assert plain.counted == {"cut_texts": 1, "dropped_tokens": 2}, "the empty text's end and the last text's"
    begun = text_documents(decoder_tokenizer(bos=True, eos_token="<eos>"), texts, 5)
    assert [row.tolist() for row in begun.input_ids] == [[2, *row] for row in split_rows]
    encoder = word_tokenizer()
    framed = text_documents(encoder, texts, 6)
    ids = encoder(texts[3], add_special_tokens=False)["input_ids"]
    assert [row.tolist() for row in framed.input_ids[1:]] == [[2, *ids[:4], 3], [2, *ids[4:], 3]]
    assert framed.counted == {"cut_texts": 1, "dropped_tokens": 1}, "a text of one token predicts nothing"


def test_a_tokenizer_without_an_end_token_and_too_short_rows_are_rejected():
    with pytest.raises(InputError, match="expected an eos or a sep token, found neither"):
        text_documents(decoder_tokenizer(), ["a"], 8)
    with pytest.raises(InputError, match="expected at least 3 tokens a document, found 2"):
        text_documents(decoder_tokenizer(bos=True, eos_token="<eos>"), ["a"], 2)
    with pytest.raises(InputError, match="expected texts of two tokens or more, found none in 2"):
        text_documents(decoder_tokenizer(eos_token="<eos>"), ["", ""], 8)


def test_an_eos_that_also_pads_stays_a_label():
    bare = decoder_tokenizer(eos_token="<eos>")
    padded = decoder_tokenizer(pad_token="<bos>", eos_token="<eos>")
    assert [find_padding_id(each) for each in (bare, decoder_tokenizer(), padded)] == [1, 0, 2]
    rows = PackedRows.build(text_documents(bare, [FILLERS[0], " ".join(FILLERS[:6])], 7), 7)
    labels = rows.collate(range(len(rows)), find_padding_id(bare))["labels"]
    assert (labels == bare.eos_token_id).sum() == 2


# --- layer losses


def layered(model: PreTrainedModel, teacher: PreTrainedModel, loss: LossConfig, batch: dict) -> tuple[dict, dict]:
    """Returns the loss terms and the gradients of their weighted sum."""
    signals, sizes = OnlineTeacher(teacher, loss.teacher_outputs), read_layer_sizes(teacher.config)
    module = DistillationModule(model, loss=loss, train=TrainConfig(), signals=signals, teacher_sizes=sizes)
    terms = module.compute_terms(batch)
    return terms, gradients(model, weighted_sum(loss, terms))


@pytest.mark.parametrize("kind", ["mse", "kl"])
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_layer_losses_do_not_compare_documents_of_one_row(family, kind):
    loss = LossConfig(kl=1, hidden=1, attention=1, attention_kind=kind, relations=1, relation_heads=2)
    parts = source(family, [9, 4, 7, 3])
    rows = PackedRows(parts, [np.array([0, 1]), np.array([3, 2])])
    layer_losses = []
    for batch in (parts.collate(range(4), 0), rows.collate([0, 1], 0)):
        student, teacher = build(family), build(family)
        draw_weights(teacher)
        layer_losses.append(layered(student, teacher, loss, batch))
    for alone, packed in zip(*layer_losses, strict=True):
        assert alone.keys() == packed.keys()
        torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)
    assert min(layer_losses[0][0].values()) > 1e-3
