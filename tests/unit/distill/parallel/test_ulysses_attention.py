"""Tests that models whose rows are divided into segments have the outputs and gradients of one process."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from distill.data.batches.packing import PackedRows
from distill.data.batches.segments import cut_segment
from distill.data.batches.token_blocks import LanguageBlocks
from distill.errors import InputError
from distill.models.inputs import build_inputs, forgo_cache
from distill.parallel.apply import apply_layout
from distill.parallel.layout import Layout, check_model_fits
from distill.parallel.mesh import build_mesh, find_segment
from distill.parallel.segment_check import check_segments
from distill.parallel.ulysses_attention import attend_with_exchange, build_row_mask, exchange_parts
from distill.train.activation_checkpointing import checkpoint_layers
from support.processes.ranks import run_ranks

WORDS, LENGTH = 60, 21
SIZES: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "head_dim": 4}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 64}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama-tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "gpt2": ("GPT2LMHeadModel", {"num_key_value_heads": 4}),
    "opt": ("OPTForCausalLM", {"ffn_dim": 24, "word_embed_proj_dim": 16}),
    "gpt-neox": ("GPTNeoXForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 5}),
    "gemma3": ("Gemma3ForCausalLM", {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}),
    "bert": ("BertForMaskedLM", {"num_key_value_heads": 4}),
    "roberta": ("RobertaForMaskedLM", {}),
    "distilbert": ("DistilBertForMaskedLM", {"dim": 16, "n_layers": 2, "n_heads": 4, "hidden_dim": 24}),
    "electra": ("ElectraForMaskedLM", {"embedding_size": 16}),
    "modernbert": ("ModernBertForMaskedLM", {"local_attention": 8, "global_attn_every_n_layers": 2}),
}
PACKED = ("llama", "mistral", "gemma3", "bert", "modernbert")
MODES = ("full", "selective")


def build(family: str, **changes: Any) -> PreTrainedModel:
    """Returns a model without dropout, in float64."""
    name, more = FAMILIES[family]
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    rates = ("attn_pdrop", "resid_pdrop", "embd_pdrop", "dropout", "attention_dropout", "hidden_dropout_prob")
    rates = dict.fromkeys((*rates, "attention_probs_dropout_prob"), 0.0)
    model = kind(kind.config_class(**(SIZES | rates | more | {"attn_implementation": "sdpa"} | changes)))
    for weights in model.parameters():
        if weights.dim() > 1:
            torch.nn.init.normal_(weights, std=0.3)
    return model.double().train()


def draw_rows(lengths: tuple[int, ...]) -> dict[str, Tensor]:
    draw = np.random.default_rng(3)
    blocks = LanguageBlocks([draw.integers(3, WORDS, length) for length in lengths])
    return blocks.collate(range(len(lengths)), 0)


def draw_packed() -> dict[str, Tensor]:
    draw = np.random.default_rng(3)
    documents = LanguageBlocks([draw.integers(3, WORDS, length) for length in (9, 8, 4, 12, 3)])
    return PackedRows(documents, [np.array([0, 1, 2]), np.array([3, 4])]).collate([0, 1], 0)


ROWS: dict[str, Any] = {
    "plain": lambda: draw_rows((LENGTH, 13, 4)),
    "short": lambda: draw_rows((5, 2)),  # four segments of 2, 2, 1 and no tokens
    "packed": draw_packed,
}


def compute(model: PreTrainedModel, batch: dict[str, Tensor], mode: str = "none") -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the logits, and the gradients of the sum of the labels' cross-entropies."""
    model.zero_grad(set_to_none=True)
    with checkpoint_layers(model, mode):
        logits = model(**build_inputs(model, batch), **forgo_cache(model, batch)).logits
        nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum").backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def compare(mesh: DeviceMesh, layout: Layout, family: str, rows: str, mode: str) -> tuple[float, float]:
    """Returns how far the logits and the summed gradients of segments are from those of whole rows."""
    model, whole, (segment, segments) = build(family), ROWS[rows](), find_segment(mesh)
    logits, expected = compute(model, whole)
    part = cut_segment(whole, segment, segments)
    segment_logits, gradients = compute(apply_layout(model, layout, mesh), part, mode)
    for each in gradients.values():
        dist.all_reduce(each)
    tokens, size = part["attention_mask"].bool(), segment_logits.shape[1]
    assert size == math.ceil(logits.shape[1] / segments)
    logits = nn.functional.pad(logits, (0, 0, 0, size * segments - logits.shape[1]))
    logits = logits[:, segment * size : (segment + 1) * size]
    assert gradients.keys() == expected.keys()
    largest = max(float(each.abs().max()) for each in expected.values())
    distances = [float((gradients[name] - each).abs().max()) / largest for name, each in expected.items()]
    return float((segment_logits - logits)[tokens].abs().max()) if tokens.any() else 0.0, max(distances)


def compare_all(rank: int, processes: int, cases: list[tuple[str, str, str]]) -> list[tuple[float, float]]:
    layout = Layout(cp=processes)
    mesh = build_mesh(layout, "cpu")
    return [compare(mesh, layout, *case) for case in cases]


CASES = [
    *((family, "plain", "none") for family in FAMILIES),
    *((family, "packed", "none") for family in PACKED),
    *((family, "plain", mode) for family in ("llama", "bert") for mode in MODES),
]


@pytest.fixture(scope="module")
def compared() -> list[list[tuple[float, float]]]:
    return run_ranks(compare_all, 2, 2, CASES)


@pytest.mark.parametrize("number", range(len(CASES)), ids=["-".join(case) for case in CASES])
def test_segments_have_the_logits_and_gradients_of_whole_rows(compared, number):
    for results in compared:
        logits, gradients = results[number]
        assert logits < 1e-5  # rotary angles and norms are in float32
        assert gradients < 1e-6


@pytest.mark.slow
def test_four_segments_have_the_logits_and_gradients_of_whole_rows():
    cases = [("gpt2", "plain", "none"), ("gpt2", "short", "none"), ("bert", "short", "none")]
    for results in run_ranks(compare_all, 4, 4, cases):
        assert all(logits < 1e-5 and gradients < 1e-6 for logits, gradients in results)


class Neighbors(nn.Module):
    """Adds to each embedding that of the token before it."""

    def __init__(self, inner: nn.Embedding):
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor) -> Tensor:
        states = self.inner(ids)
        return states + nn.functional.pad(states, (0, 0, 1, 0))[:, :-1]


def reject(call: Any) -> str:
    try:
        call()
    except InputError as error:
        return str(error)
    return ""


def run_checks(rank: int) -> dict[str, Any]:
    """Returns what two processes found of an exchange by itself, of the check of models, and of rejections."""
    layout, results = Layout(cp=2), {}
    mesh = build_mesh(layout, "cpu")
    group = mesh.get_group("cp")
    values = (torch.arange(48.0).view(2, 4, 3, 2) + 100 * rank).requires_grad_()
    heads = exchange_parts(values, 1, 2, group)
    (heads * (1 + rank)).sum().backward()
    results |= {"values": values.detach(), "heads": heads.detach(), "gradient": values.grad}
    results["back"] = torch.equal(exchange_parts(heads, 2, 1, group), values)
    llama, mixing = (apply_layout(build("llama").float(), layout, mesh) for _ in range(2))
    mixing.model.embed_tokens = Neighbors(mixing.model.embed_tokens)
    results["accepted"] = reject(lambda: check_segments(llama, group))
    results["mixing"] = reject(lambda: check_segments(mixing, group))
    results["saved"] = llama.config.to_json_string()
    query, key = torch.ones(1, 4, 3, 2), torch.ones(1, 1, 3, 2)
    attention = SimpleNamespace(is_causal=True, num_key_value_groups=4)
    results["keys"] = reject(lambda: attend_with_exchange(attention, query, key, key, None, group=group))
    results["bias"] = reject(
        lambda: attend_with_exchange(attention, query, query, query, None, group=group, softcap=30.0)
    )
    return results


@pytest.fixture(scope="module")
def checked() -> list[dict[str, Any]]:
    return run_ranks(run_checks, 2)


def test_each_process_gets_its_heads_of_all_positions_and_their_gradients_come_back(checked):
    both = torch.cat([results["values"] for results in checked], 2)
    for rank, results in enumerate(checked):
        assert torch.equal(results["heads"], both[:, 2 * rank : 2 * rank + 2])
        assert results["back"]
        assert results["gradient"][:, :2].unique().tolist() == [1]
        assert results["gradient"][:, 2:].unique().tolist() == [2]


def test_a_model_that_mixes_positions_outside_attention_is_rejected_on_all_processes(checked):
    for results in checked:
        assert results["accepted"] == ""
        assert "LlamaForCausalLM: expected the logits of whole rows, found some that differ by" in results["mixing"]


def test_the_exchange_is_not_saved(checked):
    for results in checked:
        assert '"model_type": "llama"' in results["saved"]
        assert "head_exchange" not in results["saved"]


def test_indivisible_heads_and_biases_of_scores_are_rejected_in_the_forward_pass(checked):
    for results in checked:
        assert "expected a divisor of 1 key and value heads" in results["keys"]
        assert "expected attention without biases, found softcap" in results["bias"]


# Masks


def mask_of(lengths: list[int], **settings: Any) -> Tensor | None:
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    settings = {"mask_function": causal_mask_function} | settings
    return build_row_mask(batch_size=len(lengths), q_length=2, kv_length=2, attention_mask=mask, **settings)


def test_causal_rows_padded_on_the_right_need_no_mask():
    assert mask_of([5, 3]) is None
    left = torch.tensor([[0, 0, 1, 1]]).bool()
    found = build_row_mask(batch_size=1, mask_function=causal_mask_function, attention_mask=left)
    expected = sdpa_mask(1, 4, 4, mask_function=causal_mask_function, attention_mask=left, allow_is_causal_skip=False)
    assert torch.equal(found, expected)


def test_windows_have_one_mask_for_all_rows():
    mask = mask_of([5, 3], local_size=2, mask_function=lambda b, h, q, k: (k <= q) & (k > q - 2))
    assert mask.shape == (1, 1, 5, 5)
    assert mask[0, 0].long().sum(1).tolist() == [1, 2, 2, 2, 2]
    assert mask_of([5, 3], local_size=5) is None


def test_encoders_get_a_mask_of_padding_alone():
    full = {"mask_function": bidirectional_mask_function, "allow_is_causal_skip": False}
    assert mask_of([4, 4], allow_is_bidirectional_skip=True, **full) is None
    mask = mask_of([4, 2], allow_is_bidirectional_skip=True, **full)
    assert mask[:, 0, 0].long().tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]


def test_a_mask_of_whole_rows_is_required():
    with pytest.raises(ValueError, match="expected that of whole rows, found none"):
        build_row_mask(batch_size=1, mask_function=causal_mask_function)


# Rejections before any weight is loaded

REJECTED: dict[str, tuple[Any, str]] = {
    "deberta": (transformers.DebertaV2Config(), "attention of its own, as relative positions need"),
    "mpnet": (transformers.MPNetConfig(), "attention of its own"),
    "bloom": (transformers.BloomConfig(), "attention of its own"),
    "gemma2": (transformers.Gemma2Config(), "scores are capped or have sinks"),
    "gpt-oss": (transformers.GptOssConfig(), "scores are capped or have sinks"),
    "mobilebert": (transformers.MobileBertConfig(), "embeddings join neighboring tokens"),
    "t5": (transformers.T5Config(), "with an encoder and a decoder"),
    "mamba": (transformers.MambaConfig(), "attention of its own"),
    "lfm2": (
        transformers.Lfm2Config(layer_types=["conv", "full_attention"], num_hidden_layers=2),
        "with layers of conv",
    ),
    "llama-heads": (
        transformers.LlamaConfig(hidden_size=36, num_attention_heads=9),
        "expected a divisor of the model's 9 attention heads",
    ),
    "llama-keys": (transformers.LlamaConfig(num_key_value_heads=1), "cp may be 1$"),
}


@pytest.mark.parametrize("family", REJECTED)
def test_a_family_that_cannot_exchange_heads_is_rejected_by_its_config(family):
    config, reason = REJECTED[family]
    with pytest.raises(InputError, match=rf"^student.layout cp=2: .*{reason}"):
        check_model_fits(Layout(cp=2), config, "student.layout")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_that_exchanges_heads_is_accepted_by_its_config(family):
    check_model_fits(Layout(cp=2), build(family).config, "student.layout")
