"""Slices of a model's weights: composed shapes, differentiable weights, and the index of a family."""

from pathlib import Path

import pytest
import torch

from distill.errors import InputError
from distill.slicing import Shape, find_axes, prune
from distill.slicing.nested import ModelSlice, compose_shapes, load_slice, write_slices
from distill.slicing.weights import cut_weights, list_cuts
from support.pruning_axes import tiny_model_with_axes
from support.tiny_models import saved

FIRST = Shape(
    (0, 2, 3),
    {
        "hidden": torch.arange(1, 32, 2),
        "layers.0.heads": torch.tensor([0, 3]),
        "layers.2.ffn": torch.arange(0, 64, 3),
        "layers.3.heads": torch.tensor([1, 2, 3]),
    },
)
SECOND = Shape(  # in the numbers of what FIRST leaves
    (0, 2),
    {
        "hidden": torch.tensor([0, 2, 3, 8, 9, 15]),
        "layers.0.ffn": torch.tensor([5, 6]),
        "layers.2.heads": torch.tensor([0, 2]),
    },
)


def test_a_composed_shape_prunes_as_its_parts_do_in_turn():
    model, axes = tiny_model_with_axes("bert")
    larger = prune(model, axes, FIRST)
    expected = prune(larger, find_axes(larger), SECOND).state_dict()
    found = prune(model, axes, compose_shapes(FIRST, SECOND)).state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("family", ["bert", "distilbert"])
def test_a_slice_computes_the_logits_and_the_gradients_of_the_pruned_model(family, token_batch):
    model, axes = tiny_model_with_axes(family)
    shape = Shape(FIRST.layers, {name: units for name, units in FIRST.kept.items() if name in {a.name for a in axes}})
    alone, skeleton = prune(model, axes, shape), prune(model, axes, shape)
    for weight in skeleton.parameters():
        torch.nn.init.constant_(weight, float("nan"))  # the slice must use none of its own weights
    piece = ModelSlice.of(model, axes, shape)
    weights = piece.cut(dict(model.named_parameters()))
    found = torch.func.functional_call(skeleton, weights, (), token_batch).logits
    expected = alone(**token_batch).logits
    assert torch.equal(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    gradients = {name: torch.zeros_like(w) if w.grad is None else w.grad for name, w in model.named_parameters()}
    for name, weight in alone.named_parameters():
        if weight.grad is not None:
            assert torch.allclose(piece.cut(gradients)[name], weight.grad, atol=1e-5), name
    cuts = list_cuts(axes, shape.kept)
    total = sum(float(each.abs().sum()) for each in gradients.values())
    inside = sum(float(each.abs().sum()) for each in piece.cut(gradients).values())
    assert cut_weights(gradients, cuts)
    assert inside == pytest.approx(total, rel=1e-5), "weights outside the slice have a gradient"


def test_every_slice_of_a_family_is_loaded_from_one_folder(tokenizer, token_batch, tmp_path: Path):
    model, axes = tiny_model_with_axes("bert")
    folder = saved(model, tokenizer, tmp_path / "nested")
    smaller = compose_shapes(FIRST, SECOND)
    write_slices(folder, {"2x": Shape((0, 1, 2, 3)), "4x": FIRST, "8x": smaller})
    for name, shape in (("2x", Shape((0, 1, 2, 3))), ("4x", FIRST), ("8x", smaller)):
        expected = prune(model, axes, shape)(**token_batch).logits
        assert torch.equal(load_slice(folder, name)(**token_batch).logits, expected)


def test_a_folder_without_the_index_or_the_slice_is_rejected_by_name(tmp_path: Path):
    with pytest.raises(InputError, match=r"nested\.json.*expected the index of a nested family's slices"):
        load_slice(tmp_path, "4x")
    write_slices(tmp_path, {"2x": Shape((0,))})
    with pytest.raises(InputError, match=r"expected one of the slices 2x, found '3x'"):
        load_slice(tmp_path, "3x")
    (tmp_path / "nested.json").write_text("[]")
    with pytest.raises(InputError, match="expected the index"):
        load_slice(tmp_path, "2x")
