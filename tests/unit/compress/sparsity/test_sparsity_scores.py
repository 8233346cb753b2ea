"""Tests that Wanda and SparseGPT match the papers' scores and updates on the actual inputs of each layer."""

import pytest
import torch
from torch import Tensor, nn

from compress.errors import CompressError
from compress.layer_inputs import sum_layer_inputs
from compress.sparsity import oneshot
from compress.sparsity.layers import compute_zero_shares, find_sparsifiable_layers
from compress.sparsity.oneshot import sparsify
from compress.sparsity.patterns import choose_masks
from compress.sparsity.schedule import SparsitySchedule
from compress.sparsity.sparsegpt import DAMPING, prune_with_sparsegpt


def seeded(number: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def correlated(rows: int, width: int, seed: int = 0) -> Tensor:
    """Inputs [rows, width] of low rank plus some noise, like activations."""
    generator = seeded(seed)
    low_rank = torch.randn(rows, width // 4, generator=generator) @ torch.randn(width // 4, width, generator=generator)
    return low_rank + 0.3 * torch.randn(rows, width, generator=generator)


def batches(token_batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    other = {name: value.flip(0) for name, value in token_batch.items()}
    return [token_batch, {"input_ids": other["input_ids"][:, :7], "attention_mask": other["attention_mask"][:, :7]}]


class SingleLinear(nn.Module):
    """A single linear layer that is called like a transformers model."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.linear = nn.Linear(weight.shape[1], weight.shape[0])
        self.linear.weight.data.copy_(weight)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.linear(x)


def test_wanda_scores_are_weights_times_input_norms_compared_within_rows():
    model = SingleLinear(torch.tensor([[1.0, -3.0, 2.0, 0.5], [400.0, 100.0, -100.0, 800.0]]))
    rows = [torch.tensor([[3.0, 0.1, 1.0, 0.0]]), torch.tensor([[4.0, 0.0, 0.0, 2.0]])]  # norms 5, .1, 1, 2
    masks = sparsify(
        model, SparsitySchedule(amount=0.5, score="wanda"), [{"x": x} for x in rows], select=lambda *_: True
    )
    # scores: 5, .3, 2, 1 and 2000, 10, 100, 1600
    assert masks["linear.weight"].tolist() == [[True, False, True, False], [True, False, False, True]]
    assert model.linear.weight.tolist() == [[1, 0, 2, 0], [400, 0, 0, 800]]


def test_padding_does_not_count_as_input(tiny_model, token_batch):
    model = tiny_model("bert")
    layers = find_sparsifiable_layers(model)
    padded = sum_layer_inputs(model, layers, [token_batch], lambda rows: rows.square().sum(0))
    lengths = token_batch["attention_mask"].sum(1).tolist()
    alone = [{name: value[i : i + 1, :n] for name, value in token_batch.items()} for i, n in enumerate(lengths)]
    single = sum_layer_inputs(model, layers, alone, lambda rows: rows.square().sum(0))
    for name in layers:
        torch.testing.assert_close(padded[name], single[name], rtol=1e-4, atol=1e-4)


def test_calibrating_restores_modes_and_removes_hooks(tiny_model, token_batch):
    model = tiny_model("bert").train()
    model.bert.encoder.layer[1].eval()
    modes = [module.training for module in model.modules()]
    sparsify(model, SparsitySchedule(amount=0.5, score="wanda"), [token_batch])
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("score", ["wanda", "sparsegpt"])
def test_later_blocks_are_calibrated_on_the_already_pruned_blocks(tiny_model, token_batch, score, monkeypatch):
    model, recorded_sums = tiny_model("bert"), {}
    real = oneshot.sum_layer_inputs

    def recorded(*args):
        sums = real(*args)
        recorded_sums.update(sums)
        return sums

    monkeypatch.setattr(oneshot, "sum_layer_inputs", recorded)
    data = batches(token_batch)
    sparsify(model, SparsitySchedule(amount=0.6, score=score), data)
    queries = {name: layer for name, layer in find_sparsifiable_layers(model).items() if name.endswith("query")}
    statistic = (lambda rows: rows.square().sum(0)) if score == "wanda" else (lambda rows: rows.T @ rows)
    now = sum_layer_inputs(model, queries, data, statistic)  # a query's input depends only on earlier blocks
    for name in queries:
        torch.testing.assert_close(recorded_sums[name], now[name])


@pytest.mark.parametrize("score", ["wanda", "sparsegpt"])
def test_scores_that_need_data_are_rejected_without_batches(tiny_model, score):
    with pytest.raises(CompressError, match="expected calibration batches, found none"):
        sparsify(tiny_model("bert"), SparsitySchedule(amount=0.5, score=score))


def test_movement_is_rejected_without_training(tiny_model):
    with pytest.raises(CompressError, match="movement"):
        sparsify(tiny_model("bert"), SparsitySchedule(amount=0.5, score="movement", end=3))


def test_a_layer_that_no_batch_reaches_is_rejected():
    model = nn.ModuleDict({"used": nn.Linear(4, 4), "unused": nn.Linear(4, 4)})
    model.forward = lambda x: model["used"](x)
    with pytest.raises(CompressError, match="'unused'"):
        sparsify(model, SparsitySchedule(amount=0.5, score="wanda"), [{"x": torch.ones(2, 4)}], select=lambda *_: True)


# ---- SparseGPT


def optimal_brain_surgeon(weight: Tensor, hessian: Tensor, mask: Tensor) -> Tensor:
    """Textbook optimal brain surgeon: an explicit inverse for every removed weight, row by row."""
    out = weight.double().clone()
    for row, kept in zip(out, mask, strict=True):
        for j in range(len(row)):
            if not kept[j]:
                inverse = torch.linalg.inv(hessian[j:, j:])
                row[j:] -= row[j] / inverse[0, 0] * inverse[:, 0]
                row[j] = 0
    return out


def damped(gram: Tensor) -> Tensor:
    return gram + DAMPING * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)


@pytest.mark.parametrize("pattern", ["unstructured", "2:4", "1:4"])
@pytest.mark.parametrize("columns", [4, 6, 8, 100])
def test_sparsegpt_matches_the_textbook_optimal_brain_surgeon(pattern, columns):
    weight = torch.randn(5, 16, generator=seeded(), dtype=torch.float64)
    gram = correlated(64, 16).double().T @ correlated(64, 16).double()
    config = SparsitySchedule(pattern=pattern, amount=0.5 if pattern == "unstructured" else None)
    pruned, mask = prune_with_sparsegpt("w", weight, gram, config, block_inputs=columns)
    torch.testing.assert_close(pruned, optimal_brain_surgeon(weight, damped(gram), mask), rtol=1e-9, atol=1e-9)
    assert (pruned[~mask] == 0).all()
    assert int((~mask).sum()) == round(config.final_share * 80)
    if config.n_m:
        assert (mask.view(-1, 4).sum(1) == config.n_m[0]).all()


def test_sparsegpt_removes_the_least_salient_weights():
    weight = torch.randn(12, 8, generator=seeded(), dtype=torch.float64)
    inputs = correlated(64, 8).double() * torch.logspace(1, -1, 8, dtype=torch.float64)
    gram = inputs.T @ inputs
    hessian = damped(gram)
    importance = torch.stack([weight[:, j] ** 2 / torch.linalg.inv(hessian[j:, j:])[0, 0] for j in range(8)], 1)
    _, mask = prune_with_sparsegpt("w", weight, gram, SparsitySchedule(amount=0.25))
    smallest, least_salient = (set(each.flatten().argsort()[:24].tolist()) for each in (weight.abs(), importance))
    assert smallest != least_salient
    assert set((~mask).flatten().nonzero()[:, 0].tolist()) == least_salient


def test_one_removed_weight_is_compensated_optimally():
    weight = torch.tensor([[0.01, 1.0, -2.0, 3.0]], dtype=torch.float64)
    inputs = correlated(50, 4).double()
    gram = inputs.T @ inputs
    pruned, mask = prune_with_sparsegpt("w", weight, gram, SparsitySchedule(amount=0.25), damping=0)
    assert mask.tolist() == [[False, True, True, True]]
    best = torch.linalg.lstsq(inputs[:, 1:], inputs @ weight[0]).solution  # the optimum over the other three
    torch.testing.assert_close(pruned[0, 1:], best)


@pytest.mark.parametrize(
    "config",
    [SparsitySchedule(amount=0.5, score="sparsegpt"), SparsitySchedule(amount=0.6, score="sparsegpt", scope="row")]
    + [SparsitySchedule(pattern="2:4", score="sparsegpt")],
)
def test_sparsegpt_halves_the_error_of_magnitude_with_exact_counts(config):
    weight = torch.randn(24, 300 // 4 * 4, generator=seeded())
    inputs = correlated(600, weight.shape[1])
    gram = inputs.T.double() @ inputs.double()
    pruned, mask = prune_with_sparsegpt("w", weight, gram, config)
    plain = weight * choose_masks({"w": weight.abs()}, config, config.final_share)["w"]

    def error(other: Tensor) -> float:
        return ((weight - other).double() @ inputs.T.double()).square().sum().item()

    assert error(pruned) < 0.5 * error(plain)
    assert int((pruned == 0).sum()) == int((~mask).sum()) == round(config.final_share * weight.numel())
    if config.scope == "row":
        assert ((~mask).sum(1) == round(config.final_share * weight.shape[1])).all()
    if config.n_m:
        assert (mask.view(-1, 4).sum(1) == 2).all()


def test_weights_of_an_input_that_is_always_zero_become_zero():
    inputs = correlated(64, 8).double()
    inputs[:, 3] = 0
    weight = torch.randn(2, 8, generator=seeded(), dtype=torch.float64)
    pruned, _ = prune_with_sparsegpt("w", weight, inputs.T @ inputs, SparsitySchedule(amount=0.25), damping=0)
    assert (pruned[:, 3] == 0).all()
    assert pruned.isfinite().all()


def test_inputs_without_an_inverse_are_rejected():
    with pytest.raises(CompressError, match="'w'.*invertible Gram matrix"):
        prune_with_sparsegpt("w", torch.ones(2, 4), torch.ones(4, 4), SparsitySchedule(amount=0.5), damping=0)
    with pytest.raises(CompressError, match="'w'.*invertible Gram matrix"):
        prune_with_sparsegpt("w", torch.ones(2, 4), torch.full((4, 4), torch.nan), SparsitySchedule(amount=0.5))


def test_a_model_pruned_by_sparsegpt_has_2_4_zeros_and_less_error_than_by_magnitude(tiny_model, token_batch):
    data = batches(token_batch)
    dense = tiny_model("bert")
    errors = {}
    for score in ("magnitude", "sparsegpt"):
        model = tiny_model("bert")
        masks = sparsify(model, SparsitySchedule(pattern="2:4", score=score), data)
        for name, share in compute_zero_shares(model).items():
            assert share == 0.5
            assert ((model.get_parameter(name) != 0) == masks[name]).all()
        with torch.no_grad():
            errors[score] = sum((model(**b).logits - dense(**b).logits).square().sum().item() for b in data)
    assert errors["sparsegpt"] < errors["magnitude"]
