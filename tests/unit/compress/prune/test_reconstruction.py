"""Tests of reconstruction: least squares against torch's own, and pruned models that change less."""

import pytest
import torch
from torch import nn

from compress.errors import CompressError
from compress.prune.reconstruction import measure_moments, reconstruct, reconstruct_weight
from distill.slicing import Shape, find_axes, prune
from support.tiny_families import build
from support.tiny_models import build_model

FAMILIES = ("bert", "distilbert", "modernbert", "llama", "gpt2")


def moments_of(rows: torch.Tensor) -> torch.Tensor:
    extended = nn.functional.pad(rows.double(), (0, 1), value=1.0)
    return extended.T @ extended


@pytest.fixture
def rows() -> torch.Tensor:
    """Inputs of a layer [400, 12] that depend on each other and don't have a mean of 0."""
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(400, 6, generator=generator) @ torch.randn(6, 12, generator=generator)
    return mixed + 0.1 * torch.randn(400, 12, generator=generator) + torch.linspace(-2, 2, 12)


@pytest.mark.parametrize("centred", [True, False])
def test_the_weights_are_those_of_least_squares(rows, centred):
    weight, kept_inputs = torch.randn(5, 12, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 2, 3, 7, 9])
    new, shift = reconstruct_weight(weight, moments_of(rows), kept_inputs, centred=centred, ridge=1e-12)
    wanted, inputs = rows.double() @ weight.double().T, rows.double()[:, kept_inputs]
    if centred:
        inputs = nn.functional.pad(inputs, (0, 1), value=1.0)
    expected = torch.linalg.lstsq(inputs, wanted).solution.T
    found = torch.cat([new, shift[:, None]], 1) if centred else new
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    assert centred or not shift.any()


def test_inputs_without_variance_keep_their_weights(rows):
    rows[:, 4] = 0
    weight, kept_inputs = torch.randn(5, 12), torch.tensor([2, 4, 6])
    new, _ = reconstruct_weight(weight, moments_of(rows), kept_inputs)
    torch.testing.assert_close(new[:, 1], weight[:, 4])
    assert not torch.allclose(new[:, 0], weight[:, 2])


def test_nothing_changes_where_nothing_is_removed(rows):
    weight = torch.randn(5, 12)
    new, shift = reconstruct_weight(weight, moments_of(rows), torch.arange(12))
    assert torch.equal(new, weight)
    assert not shift.any()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pruned_model_changes_less(family):
    model = build(family)
    axes = find_axes(model)
    shape = Shape(
        tuple(range(model.config.num_hidden_layers)),
        {axis.name: torch.arange(0, axis.units, 2) for axis in axes if axis.kind in ("heads", "ffn")},
    )
    generator = torch.Generator().manual_seed(0)
    texts, unseen = (torch.randint(5, 60, (64, 16), generator=generator) for _ in range(2))
    moments = measure_moments(model, axes, [{"input_ids": texts, "attention_mask": torch.ones_like(texts)}])
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    changed = reconstruct(model, axes, shape, moments)
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())

    def distance(other: nn.Module) -> float:
        with torch.no_grad():
            return float((other(input_ids=unseen).logits - model(input_ids=unseen).logits).square().mean())

    plain, restored = (distance(prune(each, axes, shape)) for each in (model, changed))
    assert restored < 0.95 * plain


def test_moments_leave_padding_out():
    model = build_model("bert")
    axes = find_axes(model)
    ids = torch.tensor([[7, 8, 9, 0, 0], [5, 6, 7, 8, 9]])
    alone = [
        {"input_ids": row[None], "attention_mask": torch.ones(1, len(row), dtype=torch.long)}
        for row in (ids[0, :3], ids[1])
    ]
    padded = measure_moments(model, axes, [{"input_ids": ids, "attention_mask": (ids > 0).long()}])
    for name, moments in measure_moments(model, axes, alone).items():
        assert moments[-1, -1] == 8
        torch.testing.assert_close(padded[name], moments, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("corrupt", [lambda m: m[:-1, :-1], lambda m: m * float("nan"), lambda m: m * 0])
def test_moments_of_other_inputs_are_rejected(rows, corrupt):
    with pytest.raises(CompressError, match=r"finite sums of products \[13, 13\]"):
        reconstruct_weight(torch.randn(5, 12), corrupt(moments_of(rows)), torch.tensor([0, 1]))
