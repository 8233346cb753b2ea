"""Tests that pruned models match masked ones for every family and shape, and use stock classes where possible."""

import copy
import itertools

import pytest
import torch
from transformers import PreTrainedModel

from distill.checkpoint.custom_models import is_pruned
from distill.errors import InputError
from distill.slicing import Shape, find_axes, mask_model, prune
from support.tiny_families import FAMILIES, axes_of, build, last, logits, model_of, padded_batch, random_shape

ALL = (0, 1, 2)
CASES = {
    "heads": (("heads",), ALL),
    "ffn": (("ffn",), ALL),
    "hidden": (("hidden",), ALL),
    "layers": ((), (0, 2)),
    "first layer": ((), (1, 2)),
    "all": (("heads", "ffn", "hidden"), (1, 2)),
}


def assert_equal_logits(found: PreTrainedModel, reference: PreTrainedModel, batch: dict[str, torch.Tensor]) -> None:
    expected = logits(reference, batch)
    error = (logits(found, batch) - expected).abs().max()
    assert error <= 1e-5 * max(1.0, float(expected.abs().max())), error


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_sliced_model_computes_the_masked_models_logits(family: str, case: str):
    model, axes = model_of(family), axes_of(family)
    kinds, layers = CASES[case]
    shape = random_shape(axes, seed=len(family), kinds=kinds, layers=layers, largest=0.7)
    batch = padded_batch(model)
    reference, pruned = mask_model(model, axes, shape), prune(model, axes, shape)
    assert_equal_logits(pruned, reference, batch)
    difference = (logits(model, batch) - logits(reference, batch)).abs().max()
    assert difference > 0.01, "the mask does nothing"
    assert sum(p.numel() for p in pruned.parameters()) < sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("seed", range(4))
def test_random_shapes_compute_the_masked_models_logits(seed: int):
    for family in ("bert", "qwen3", "gpt2", "modernbert"):
        model, axes = model_of(family), axes_of(family)
        layers = list(itertools.compress(ALL, ((1, 1, 1), (1, 0, 1), (0, 0, 1), (0, 1, 0))[seed]))
        shape = random_shape(axes, seed, ("heads", "ffn", "hidden"), layers)
        assert_equal_logits(prune(model, axes, shape), mask_model(model, axes, shape), padded_batch(model))


@pytest.mark.parametrize(("family", "pad"), [("bert-words", 2), ("llama", 1), ("gpt2", 0)])
def test_logits_after_vocabulary_pruning_match_the_kept_rows(family: str, pad: int):
    model = build(family, pad_token_id=pad)
    axes = axes_of(family)
    rows = torch.tensor([pad, *range(7, 60, 2)])
    shape = random_shape(axes, 3, ("heads", "hidden"), ALL)
    words = Shape(ALL, {**shape.kept, "vocabulary": rows})
    batch = padded_batch(model)
    places = torch.randint(1, len(rows), batch["input_ids"].shape, generator=torch.Generator().manual_seed(1))
    places = places * batch["attention_mask"]  # the padding id is renumbered to 0
    pruned = prune(model, axes, words)
    expected = logits(mask_model(model, axes, words), batch | {"input_ids": rows[places]})[:, rows]
    found = logits(pruned, batch | {"input_ids": places})
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert pruned.config.vocab_size == len(rows)
    assert pruned.config.pad_token_id == 0
    assert pruned.get_input_embeddings().padding_idx == (None if family == "gpt2" else 0)


def test_removing_or_moving_the_padding_row_is_rejected_where_positions_depend_on_it():
    axes = axes_of("roberta")
    with pytest.raises(InputError, match="padding id 0 to be kept"):
        prune(model_of("roberta"), axes, Shape(ALL, {"vocabulary": torch.arange(3, 20)}))
    model = build("roberta", pad_token_id=1)
    with pytest.raises(InputError, match=r"padding id 1 to keep its number, found 0.*position_embeddings"):
        prune(model, axes, Shape(ALL, {"vocabulary": torch.arange(1, 20)}))
    assert prune(model, axes, Shape(ALL, {"vocabulary": torch.tensor([0, 1, 9])})).config.pad_token_id == 1


STOCK = {  # units that the stock class can express, and the resulting config settings
    "bert": (
        {"hidden": 16, "heads": 2, "ffn": 24},
        {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24},
    ),
    "electra": ({"hidden": 16, "heads": 2}, {"hidden_size": 16, "embedding_size": 16}),
    "electra-projected": ({"hidden": 16, "heads": 2}, {"hidden_size": 16, "embedding_size": 24}),
    "distilbert": ({"hidden": 16, "heads": 2, "ffn": 24}, {"dim": 16, "n_heads": 2, "hidden_dim": 24}),
    "modernbert": ({"hidden": 24, "heads": 3, "ffn": 24}, {"hidden_size": 24, "num_attention_heads": 3}),
    "gpt2": ({"hidden": 24, "heads": 3}, {"n_embd": 24, "n_head": 3, "n_inner": 40}),
    "llama": ({"heads": 1, "ffn": 9}, {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}),
    "qwen2": ({"hidden": 20}, {"hidden_size": 20, "num_attention_heads": 4, "head_dim": 8}),
    "qwen3": ({"hidden": 16, "heads": 1}, {"hidden_size": 16, "num_attention_heads": 2, "head_dim": 12}),
}


@pytest.mark.parametrize("family", STOCK)
def test_uniform_shapes_are_expressed_by_the_stock_class(family: str):
    units, settings = STOCK[family]
    model, axes = model_of(family), axes_of(family)
    shape = last(axes, (0, 2), **units)
    pruned = prune(model, axes, shape, uniform=True)
    assert type(pruned) is type(model)
    config = pruned.config.to_dict()
    assert {key: config[key] for key in settings} == settings
    assert len(config.get("layer_types") or (0, 2)) == 2
    assert_equal_logits(pruned, mask_model(model, axes, shape), padded_batch(model))


OTHERS = {
    "bert": ((0, 1), {"heads": 2}, "the pruned model has"),
    "roberta": (ALL, {"hidden": 18}, "not a multiple"),
    "gemma": (ALL, {"hidden": 16}, "embed_scale"),
    "modernbert": ((1, 2), {}, "attn_norm"),
    "llama": (ALL, {"hidden": 30}, "not a multiple"),
}


@pytest.mark.parametrize("family", OTHERS)
def test_uniform_shapes_that_the_stock_class_cannot_express_are_rejected(family: str):
    layers, units, reason = OTHERS[family]
    model, axes = model_of(family), axes_of(family)
    shape = last(axes, layers, **units)
    with pytest.raises(InputError, match=rf"{type(model).__name__} can't express this shape.*{reason}"):
        prune(model, axes, shape, uniform=True)


def test_attention_scaled_by_layer_index_keeps_the_original_index():
    model = build("gpt2", scale_attn_by_inverse_layer_idx=True)
    axes = axes_of("gpt2")
    shape = Shape((1, 2))
    pruned = prune(model, axes, shape)
    assert is_pruned(pruned)
    assert_equal_logits(pruned, mask_model(model, axes, shape), padded_batch(model))


def test_remaining_layers_keep_their_attention_types():
    model, axes = model_of("modernbert"), axes_of("modernbert")
    pruned = prune(model, axes, Shape((0, 2)), uniform=True)
    assert pruned.config.layer_types == [model.config.layer_types[i] for i in (0, 2)]


@pytest.mark.parametrize("family", ["bert", "gpt2", "modernbert", "qwen3"])
def test_a_pruned_model_can_be_pruned_again(family: str):
    model = model_of(family)
    once = prune(model, axes_of(family), random_shape(axes_of(family), 5, ("heads", "ffn", "hidden"), (1, 2)))
    axes = find_axes(once)
    assert is_pruned(once)
    shape = random_shape(axes, 6, ("heads", "ffn", "hidden"), (1,), largest=0.8)
    again = prune(once, axes, shape)
    assert_equal_logits(again, mask_model(once, axes, shape), padded_batch(model))
    assert again.config.num_hidden_layers == 1


def test_a_pruned_model_that_becomes_uniform_returns_to_the_stock_class():
    model, axes = model_of("bert"), axes_of("bert")
    once = prune(model, axes, Shape(ALL, {"layers.1.heads": torch.tensor([2]), "layers.2.ffn": torch.arange(9)}))
    assert is_pruned(once)
    axes = find_axes(once)
    again = prune(once, axes, Shape((0,)), uniform=True)
    assert type(again) is type(model)
    assert_equal_logits(again, mask_model(once, axes, Shape((0,))), padded_batch(model))


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_a_pruned_model_generates_the_same_tokens_with_and_without_a_cache(family: str):
    model, axes = model_of(family), axes_of(family)
    pruned = prune(model, axes, random_shape(axes, 5, ("heads", "ffn"), (0, 2)))
    ids = torch.randint(5, 60, (2, 5), generator=torch.Generator().manual_seed(0))
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "attention_mask": torch.ones_like(ids)}
    written = [pruned.generate(ids, use_cache=use_cache, **settings) for use_cache in (True, False)]
    assert torch.equal(*written)


def test_pruning_neither_changes_the_original_nor_shares_its_memory():
    model, axes = build("bert"), axes_of("bert")
    before, config = copy.deepcopy(model.state_dict()), model.config.to_dict()
    pruned = prune(model.train(), axes, Shape(ALL, {"layers.0.heads": torch.tensor([1])}))
    assert pruned.training
    mask_model(model, axes, Shape((0,), {"hidden": torch.tensor([1])}))
    with torch.no_grad():
        for parameter in pruned.parameters():
            parameter.zero_()
    assert model.config.to_dict() == config
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_dtype_and_weight_tying_are_preserved():
    model, axes = build("qwen2").to(torch.bfloat16), axes_of("qwen2")
    pruned = prune(model, axes, random_shape(axes, 1, ("heads", "hidden"), ALL))
    assert pruned.dtype == torch.bfloat16
    assert pruned.lm_head.weight is pruned.model.embed_tokens.weight
    assert pruned.model.rotary_emb.inv_freq.dtype == torch.float32


def test_invalid_shapes_are_rejected():
    model, axes = model_of("bert"), axes_of("bert")
    for shape, message in (
        (
            Shape(ALL, {"layers.1.ffn": torch.tensor([], dtype=torch.int64)}),
            r"layers.1.ffn: expected at least one kept of 64",
        ),
        (Shape(ALL, {"layers.1.fnn": torch.tensor([1])}), r"expected the name of an axis.*did you mean layers.1.ffn"),
        (Shape(ALL, {"layers.1.heads": torch.tensor([2, 1])}), "expected ascending indices from 0 to 3"),
        (Shape(ALL, {"layers.1.heads": torch.tensor([1, 4])}), "expected ascending indices from 0 to 3"),
        (Shape(ALL, {"layers.1.heads": torch.tensor([True, False])}), "expected int64"),
        (Shape(()), "layers: expected at least one kept of 3"),
        (Shape((0, 3)), "layers: expected ascending indices from 0 to 2"),
    ):
        for act in (prune, mask_model):
            with pytest.raises(InputError, match=message):
                act(model, axes, shape)


def test_a_shape_survives_a_round_trip_through_a_dict():
    shape = random_shape(axes_of("bert"), 1, ("heads", "hidden"), (0, 2))
    again = Shape.from_dict(shape.to_dict())
    assert again.layers == shape.layers
    assert again.kept.keys() == shape.kept.keys()
    assert all(torch.equal(again.kept[name], units) for name, units in shape.kept.items())
