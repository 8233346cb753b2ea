"""Tests trainable masks that learn which units to close."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from compress.errors import CompressError
from compress.prune.importance.gates import LAYERS, Gates
from compress.prune.importance.learned_masks import (
    LearnedMasks,
    MovementScores,
    compute_hard_concrete,
    sample_logistic_noise,
)
from compress.prune.schedule import interpolate_cubic
from support.pruning_axes import tiny_model_with_axes

Batch = dict[str, Tensor]


def open_share(gates: dict[str, Tensor]) -> Tensor:
    """Returns the share of open units, used as the cost."""
    return torch.cat(list(gates.values())).mean()


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(11)


def masks(units: dict[str, int], target: float = 0.3, warmup: int = 20, **settings: float) -> LearnedMasks:
    return LearnedMasks(units, open_share, target=target, warmup=warmup, **settings)


def test_expected_gates_are_the_mean_of_many_samples():
    learned, draws = masks({"some.axis": 5 * 20000}), 20000
    log_alpha = torch.tensor([-3.0, -1.0, 0.0, 1.5, 4.0])
    learned.log_alpha["some-axis"].data = log_alpha.repeat(draws)
    samples = learned.sample()["some.axis"].view(draws, 5)
    expected, chance = (
        learned.compute_mean_gates()["some.axis"][:5],
        learned.compute_open_probability()["some.axis"][:5],
    )
    torch.testing.assert_close(expected, samples.mean(dim=0), atol=0.01, rtol=0)
    torch.testing.assert_close(chance, (samples != 0).float().mean(dim=0), atol=0.01, rtol=0)
    assert samples.min() == 0
    assert samples.max() == 1


def test_masks_start_at_the_requested_open_probability():
    assert torch.allclose(masks({"a": 3}, start=0.8).compute_open_probability()["a"], torch.tensor(0.8))


def test_samples_are_reproducible_with_the_same_seed():
    learned = masks({"a": 50})
    torch.manual_seed(1)
    first = learned.sample()["a"]
    assert not torch.equal(learned.sample()["a"], first)
    torch.manual_seed(1)
    assert torch.equal(learned.sample()["a"], first)


def test_noise_is_always_finite():
    torch.manual_seed(0)
    noise = sample_logistic_noise(torch.zeros(3_000_000))
    assert noise.isfinite().all()
    assert compute_hard_concrete(noise).isfinite().all()


def test_gradients_reach_every_parameter():
    learned = masks({"a": 200, LAYERS: 4})
    (sum(gate.sum() for gate in learned.sample().values()) + learned.compute_penalty(100)).backward()
    assert (learned.log_alpha["a"].grad != 0).any()
    # the multipliers' gradient is reversed, so that gradient descent performs ascent on them
    excess = open_share(learned.compute_open_probability()).detach() - 0.3
    torch.testing.assert_close(learned.multipliers.grad, -torch.stack((excess, excess.square())))


@pytest.mark.parametrize("target", [0.2, 0.6])
def test_multipliers_drive_the_cost_to_the_target(target: float):
    """Unit importances are 0, 1/40, 2/40 …; closing a unit adds its importance to the loss."""
    learned, importance = masks({"a": 40}, target=target, warmup=100), torch.arange(40) / 40
    groups = [{"params": learned.log_alpha.parameters()}, {"params": [learned.multipliers], "lr": 0.3}]
    optimizer, shares = torch.optim.Adam(groups, lr=0.1), []
    for step in range(800):
        optimizer.zero_grad()
        (((1 - learned.sample()["a"]) * importance).sum() / 40 + learned.compute_penalty(step)).backward()
        optimizer.step()
        shares.append(open_share(learned.compute_open_probability()).item())
    assert sum(shares[-400:]) / 400 == pytest.approx(target, abs=0.02)  # the share oscillates around the target
    assert max(abs(share - target) for share in shares[-400:]) < 0.15
    kept_units = learned.compute_open_probability()["a"].topk(round(40 * target)).indices
    assert float(importance[kept_units].mean()) > 0.9 * float(importance[-len(kept_units) :].mean())


def test_the_target_falls_linearly_while_warming_up():
    learned = masks({"a": 10}, target=0.3, warmup=10)
    assert [learned.get_target(step) for step in (0, 5, 10, 99)] == pytest.approx([0.95, 0.625, 0.3, 0.3], rel=1e-6)
    assert masks({"a": 10}, warmup=0).get_target(0) == pytest.approx(0.3)


@pytest.mark.parametrize("target", [0.0, 0.99])
def test_a_target_out_of_range_is_rejected(target: float):
    with pytest.raises(CompressError, match="expected more than 0"):
        masks({"a": 10}, target=target)


def test_a_useless_head_closes_first(token_batch: Batch):
    model, axes = tiny_model_with_axes("bert")
    model.bert.encoder.layer[2].attention.output.dense.weight.data[:, 8:16] = 0
    model.requires_grad_(False)
    with torch.no_grad():
        whole = model(**token_batch).logits
    gates = Gates(model, axes)
    learned = masks({name: size for name, size in gates.sizes.items() if name.endswith("heads")}, target=0.9, warmup=10)
    optimizer = torch.optim.Adam(learned.parameters(), lr=0.1)
    with gates:
        for step in range(60):
            optimizer.zero_grad()
            gates.set(learned.sample())
            (F.mse_loss(model(**token_batch).logits, whole) + learned.compute_penalty(step)).backward()
            optimizer.step()
    openness = {
        (name, i): p for name, gate in learned.compute_open_probability().items() for i, p in enumerate(gate.tolist())
    }
    first, second = sorted(openness, key=openness.__getitem__)[:2]
    assert first == ("layers.2.heads", 1)
    assert openness[first] < openness[second] - 0.05


def test_resumed_training_is_bit_identical_to_uninterrupted_training():
    def train(learned: LearnedMasks, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            torch.manual_seed(step)
            optimizer.zero_grad()
            (learned.sample()["a.b"].square().sum() + learned.compute_penalty(step)).backward()
            optimizer.step()

    def new() -> tuple[LearnedMasks, torch.optim.Optimizer]:
        learned = masks({"a.b": 6})
        return learned, torch.optim.Adam(learned.parameters(), lr=0.1)

    whole, first, second = new(), new(), new()
    train(*whole, range(20))
    train(*first, range(10))
    for stopped, resumed in zip(first, second, strict=True):
        resumed.load_state_dict(stopped.state_dict())
    train(*second, range(10, 20))
    assert all(torch.equal(value, second[0].state_dict()[name]) for name, value in whole[0].state_dict().items())


def test_movement_scores_are_minus_the_sum_of_weights_times_gradients(token_batch: Batch):
    """For weights that take the unit as input, their product with their gradient is the gate's gradient."""
    model, axes = tiny_model_with_axes("bert")
    gates = Gates(model, axes)
    movement = MovementScores(gates.sizes)
    weight, expected = model.bert.encoder.layer[1].output.dense.weight, torch.zeros(64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gates:
        for _ in range(3):
            optimizer.zero_grad()
            gates.set(movement.make_gates())
            model(**token_batch).logits.square().mean().backward()
            movement.accumulate()
            expected -= (weight.detach() * weight.grad).sum(dim=0)
            optimizer.step()
    torch.testing.assert_close(movement.scores()["layers.1.ffn"], expected, rtol=1e-4, atol=1e-6)
    again = MovementScores(gates.sizes)
    again.load_state_dict(movement.state_dict())
    assert torch.equal(again.scores()["layers.1.ffn"], movement.scores()["layers.1.ffn"])


def test_closed_units_still_accumulate_movement_scores(token_batch: Batch):
    model, axes = tiny_model_with_axes("bert")
    gates = Gates(model, axes)
    movement = MovementScores({"layers.1.ffn": 64})
    gates.set(movement.make_gates({"layers.1.ffn": torch.arange(10, 64)}))
    with gates:
        model(**token_batch).logits.square().mean().backward()
    movement.accumulate()
    assert (movement.scores()["layers.1.ffn"][:10] != 0).all()


def test_accumulating_twice_adds_a_gradient_once(token_batch: Batch):
    movement = MovementScores({"a": 2})
    (movement.make_gates()["a"] * torch.tensor([1.0, -2.0])).sum().backward()
    movement.accumulate()
    movement.accumulate()
    assert movement.scores()["a"].tolist() == [-1, 2]


def test_the_cubic_schedule_prunes_fastest_at_the_start():
    shares = [interpolate_cubic(step, 10, 30, 0.1, 0.9) for step in (0, 10, 20, 30, 99)]
    assert shares == pytest.approx([0.1, 0.1, 0.9 - 0.8 / 8, 0.9, 0.9])
    assert interpolate_cubic(10, 10, 10, 0.1, 0.9) == 0.9
    assert interpolate_cubic(9, 10, 10, 0.1, 0.9) == 0.1
    with pytest.raises(CompressError, match="ends before"):
        interpolate_cubic(0, 5, 4, 0, 1)
