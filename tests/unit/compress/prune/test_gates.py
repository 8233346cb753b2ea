"""Tests gates that multiply units and layers; closing a gate must equal removing the unit or layer."""

import copy
import dataclasses

import pytest
import torch
from torch import Tensor, nn

from compress.errors import CompressError
from compress.prune.importance.gates import LAYERS, Gates
from distill.slicing import Slot
from support.pruning_axes import largest_gap, tiny_llama, tiny_model_with_axes, without_layer, without_units
from support.tiny_models import MODELS

FAMILIES = ("bert", "llama")
Batch = dict[str, Tensor]

KEPT = {
    "layers.0.heads": torch.tensor([1]),
    "layers.1.ffn": torch.tensor([0, 3, 5, 17, 30, 31, 40]),
    "hidden": torch.tensor([0, 1, 2, 5, 8, 9, 11, 14, 15, 16, 20, 23, 25, 28, 30, 31]),
}


def valid_logits(model, batch: Batch) -> Tensor:
    """Returns the logits of all tokens except padding, or of all samples."""
    with torch.no_grad():
        logits = model(**batch).logits
    return logits[batch["attention_mask"].bool()] if logits.dim() == 3 else logits


@pytest.mark.parametrize("names", [["layers.0.heads"], ["layers.1.ffn"], ["hidden"], list(KEPT)])
@pytest.mark.parametrize("family", [*MODELS, "llama"])
def test_closing_units_equals_removing_them(family: str, names: list[str], token_batch: Batch):
    model, axes = tiny_model_with_axes(family)
    kept_units = {name: KEPT[name] for name in names}
    gates = Gates(model, axes)
    gates.set(gates.make_mask(kept_units))
    with gates:
        gated = valid_logits(model, token_batch)
    assert largest_gap(gated, valid_logits(without_units(model, axes, kept_units), token_batch)) < 2e-6
    assert largest_gap(gated, valid_logits(model, token_batch)) > 1e-3  # the units had an effect


@pytest.mark.parametrize("kind", ["heads", "ffn"])
@pytest.mark.parametrize("family", FAMILIES)
def test_closing_units_equals_zeroing_their_output_weights(family: str, kind: str, token_batch: Batch):
    model, axes = tiny_model_with_axes(family)
    axis = next(axis for axis in axes if axis.kind == kind)
    closed = torch.tensor([1])
    zeroed = copy.deepcopy(model)
    for slot in (slot for slot in axis.slots if slot.role == "in"):
        zeroed.get_parameter(slot.parameter).data.index_fill_(slot.dim, axis.coordinates(slot, closed), 0)
    values = {axis.name: torch.ones(axis.units).index_fill(0, closed, 0)}
    with Gates(model, axes, values):
        assert largest_gap(valid_logits(model, token_batch), valid_logits(zeroed, token_batch)) < 1e-6


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_closing_a_layer_equals_removing_it(family: str, number: int, token_batch: Batch):
    model, axes = tiny_model_with_axes(family)
    gates = Gates(model, axes)
    stay = [layer for layer in range(len(gates.layers)) if layer != number]
    gates.set(gates.make_mask({LAYERS: torch.tensor(stay)}))
    with gates:
        gated = valid_logits(model, token_batch)
    assert torch.equal(gated, valid_logits(without_layer(model, number), token_batch))


@pytest.mark.parametrize("family", FAMILIES)
def test_open_gates_change_nothing(family: str, token_batch: Batch):
    model, axes = tiny_model_with_axes(family)
    before = valid_logits(model, token_batch)
    gates = Gates(model, axes)
    ones = gates.make_open()
    with gates:
        gates.set({name: gate for name, gate in ones.items() if name != "hidden"})
        assert torch.equal(valid_logits(model, token_batch), before)
        gates.set(ones)
        assert largest_gap(valid_logits(model, token_batch), before) < 2e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_removing_gates_restores_logits_weights_and_hooks(family: str, token_batch: Batch):
    model, axes = tiny_model_with_axes(family)
    before, weights = valid_logits(model, token_batch), copy.deepcopy(model.state_dict())
    gates = Gates(model, axes)
    gates.set({name: one * 0.3 for name, one in gates.make_open().items()})
    gates.attach()
    assert largest_gap(valid_logits(model, token_batch), before) > 1e-3
    gates.remove()
    assert torch.equal(valid_logits(model, token_batch), before)
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_gates_are_removed_after_an_error(token_batch: Batch):
    model, axes = tiny_model_with_axes("bert")
    with pytest.raises(ZeroDivisionError), Gates(model, axes):
        raise ZeroDivisionError
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_gates_survive_switching_between_train_and_eval(token_batch: Batch):
    model, axes = tiny_model_with_axes("bert")
    gates = Gates(model, axes)
    gates.set(gates.make_mask(KEPT))
    with gates:
        first = valid_logits(model, token_batch)
        model.train()
        valid_logits(model, token_batch)
        model.eval()
        assert torch.equal(valid_logits(model, token_batch), first)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_sample_gets_its_own_gates(family: str, token_batch: Batch):
    model, axes = tiny_model_with_axes(family)
    gates = Gates(model, axes)
    generator = torch.Generator().manual_seed(3)
    drawn = {name: torch.rand(one.shape, generator=generator) for name, one in gates.make_open(6).items()}
    with gates, torch.no_grad():
        gates.set(drawn)
        together = model(**token_batch).logits
        for row in range(6):
            gates.set({name: gate[row] for name, gate in drawn.items()})
            alone = model(**{name: value[row : row + 1] for name, value in token_batch.items()}).logits[0]
            real = token_batch["attention_mask"][row].bool() if alone.dim() == 2 else ...
            assert largest_gap(together[row][real], alone[real]) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_change_continuously_between_open_and_closed_gates(family: str, token_batch: Batch):
    model, axes = tiny_model_with_axes(family)
    for name in ("hidden", "layers.0.heads", LAYERS):
        gates = Gates(model, axes)
        one = gates.make_open()[name]
        with gates:
            for end, near in ((0.0, 1e-5), (1.0, 1 - 1e-5)):
                gates.set({name: torch.cat((torch.tensor([end]), one[1:]))})
                exact = valid_logits(model, token_batch)
                gates.set({name: torch.cat((torch.tensor([near]), one[1:]))})
                assert largest_gap(valid_logits(model, token_batch), exact) < 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_every_gate_gets_a_gradient(family: str, token_batch: Batch):
    model, axes = tiny_model_with_axes(family)
    gates = Gates(model, axes)
    gates.set({name: (one * 0.7).requires_grad_() for name, one in gates.make_open().items()})
    with gates:
        model(**token_batch).logits.square().mean().backward()
    assert all((gate.grad != 0).all() and gate.grad.isfinite().all() for gate in gates.values.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_gates_work_in_half_precision(family: str, token_batch: Batch):
    model, axes = tiny_model_with_axes(family)
    gates = Gates(model, axes)
    kept_units = gates.make_mask(KEPT)
    gates.set({name: gate.requires_grad_() for name, gate in (gates.make_open() | kept_units).items()})
    with gates:
        exact = valid_logits(model, token_batch)
        with torch.autocast("cpu", torch.bfloat16):
            mixed = valid_logits(model, token_batch)
        logits = model.bfloat16()(**token_batch).logits
        logits.float().square().mean().backward()
    assert largest_gap(mixed.float(), exact) < 0.1
    assert logits.dtype == torch.bfloat16
    assert all(gate.grad.isfinite().all() for gate in gates.values.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_closed_coordinates_are_zero_in_hidden_states(family: str, token_batch: Batch):
    model, axes = tiny_model_with_axes(family)
    gates = Gates(model, axes)
    gates.set(gates.make_mask({"hidden": KEPT["hidden"]}))
    with gates, torch.no_grad():
        states = model(**token_batch, output_hidden_states=True).hidden_states
    closed = [i for i in range(32) if i not in KEPT["hidden"].tolist()]
    assert all((state[..., closed] == 0).all() and (state[..., KEPT["hidden"]] != 0).any() for state in states)


def test_a_tied_output_layer_is_gated_like_an_untied_one(token_batch: Batch):
    model = tiny_llama(tie_word_embeddings=True)
    hidden = next(axis for axis in tiny_model_with_axes("llama")[1] if axis.name == "hidden")
    once = dataclasses.replace(hidden, slots=tuple(s for s in hidden.slots if s.parameter != "lm_head.weight"))
    apart = tiny_llama(tie_word_embeddings=False)
    apart.load_state_dict(model.state_dict() | {"lm_head.weight": model.model.embed_tokens.weight})
    value = {"hidden": torch.linspace(0, 1, 32)}
    with Gates(model, [once], value), Gates(apart, [hidden], value):
        assert torch.equal(valid_logits(model, token_batch), valid_logits(apart, token_batch))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"layers.9.ffn": torch.ones(64)}, "no such axis"),
        ({"layers.0.ffn": torch.ones(63)}, r"expected shape \[64\] or \[batch, 64\], found \[63\]"),
        ({LAYERS: torch.ones(5)}, r"expected shape \[4\]"),
    ],
)
def test_gates_of_unknown_axes_or_wrong_sizes_are_rejected(values: dict[str, Tensor], message: str):
    model, axes = tiny_model_with_axes("bert")
    with pytest.raises(CompressError, match=message):
        Gates(model, axes, values)


def test_gates_for_another_number_of_samples_are_rejected(token_batch: Batch):
    model, axes = tiny_model_with_axes("bert")
    with Gates(model, axes, {"layers.0.ffn": torch.ones(5, 64)}), pytest.raises(CompressError, match="5 samples"):
        model(**token_batch)


@pytest.mark.parametrize(
    ("slot", "message"),
    [
        (Slot("bert.encoder.layer.0.nothing.weight", 1, 1, 1, "in"), "expected a weight .*, found none"),
        (
            Slot("bert.encoder.layer.0.intermediate.dense.weight", 0, 1, 1, "out"),
            "expected 1 x 32 x 1 coordinates .*, found 64",
        ),
        (Slot("extra.weight", 0, 1, 1, "scale"), "expected a LayerNorm"),
        (Slot("extra.weight", 0, 1, 1, "in"), "expected a linear layer"),
    ],
)
def test_slots_that_do_not_fit_the_model_are_rejected(slot: Slot, message: str):
    model, axes = tiny_model_with_axes("bert")
    model.extra = nn.BatchNorm1d(32)
    hidden = next(axis for axis in axes if axis.name == "hidden")
    with pytest.raises(CompressError, match=message):
        Gates(model, [dataclasses.replace(hidden, slots=(*hidden.slots, slot))])


def test_the_vocabulary_axis_is_not_gated():
    model, axes = tiny_model_with_axes("llama")
    assert "vocabulary" in {axis.name for axis in axes}
    assert "vocabulary" not in Gates(model, axes).make_open()
