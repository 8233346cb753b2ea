"""Tests training with masks: zeros stay zero, masks move as in the papers, and the result is a plain checkpoint."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from transformers import AutoModelForSequenceClassification, BertForSequenceClassification

from compress.errors import CompressError
from compress.sparsity.layers import compute_zero_shares
from compress.sparsity.oneshot import sparsify
from compress.sparsity.schedule import SparsitySchedule
from compress.sparsity.training import SparseTraining, convert_sparse, prepare_sparse, rewire_units
from distill.train.averaging import WeightAverage

HALF = SparsitySchedule(amount=0.5)
RIGL = SparsitySchedule(amount=0.8, rewire=0.3, begin=0, end=16, every=4)


def everything(name: str, layer: nn.Linear) -> bool:
    return True


def net(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 8))


def data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(16, 12, generator=generator), torch.randn(16, 8, generator=generator)


def backward(model: nn.Module, step: int) -> None:
    inputs, targets = data(step)
    model.zero_grad()
    (model(inputs) - targets).square().mean().backward()


def adamw(model: nn.Module) -> AdamW:
    return AdamW(model.parameters(), lr=0.02, weight_decay=0.1, fused=True)


def train_steps(model: nn.Module, training: SparseTraining, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        backward(model, step)
        training.after_backward()
        optimizer.step()
        training.after_step(optimizer)


@pytest.mark.parametrize("skipped", [1, 3], ids=["in the middle", "in the last step"])
@pytest.mark.parametrize("score", ["magnitude", "movement"])
def test_the_schedule_goes_on_over_a_step_that_is_not_taken(score, skipped):
    model = net()
    config = SparsitySchedule(amount=0.5, score=score, end=4)
    training, optimizer = prepare_sparse(model, config, select=everything), adamw(model)
    train_steps(model, training, optimizer, range(skipped))
    training.skip_step(optimizer)
    assert training.step == skipped + 1
    expected = pytest.approx(config.compute_share(skipped + 1), abs=0.01)
    assert list(compute_zero_shares(model, everything).values()) == [expected] * 2
    train_steps(model, training, optimizer, range(skipped + 1, 4))
    assert list(compute_zero_shares(convert_sparse(training), everything).values()) == [0.5] * 2


def test_a_skipped_step_changes_no_masks_that_are_held_or_rewired():
    for config, held in ((RIGL, False), (HALF, True)):
        model = net()
        masks = {f"{name}.weight": layer.weight > 0 for name, layer in model.named_children() if name != "1"}
        training = prepare_sparse(model, config, select=everything, masks=masks if held else None)
        before = {name: mask.clone() for name, mask in training.masks.items()}
        training.skip_step(adamw(model))
        assert all(torch.equal(mask, before[name]) for name, mask in training.masks.items())


def removed_of(training: SparseTraining) -> dict[str, Tensor]:
    return {name: weight.detach()[~training.masks[name]] for name, weight in training.weights.items()}


def zeros(training: SparseTraining) -> int:
    return sum(int((~mask).sum()) for mask in training.masks.values())


# ---- masks hold


@pytest.mark.parametrize("pattern", ["unstructured", "2:4", "4x1", "1x4"])
def test_removed_weights_stay_zero_and_have_no_optimizer_state(pattern):
    config = SparsitySchedule(pattern=pattern, amount=None if ":" in pattern else 0.5, begin=5, end=5)
    model = net()
    optimizer = adamw(model)
    training = prepare_sparse(model, config, select=everything)
    train_steps(model, training, optimizer, range(4))
    assert zeros(training) == 0
    # Nonzero momentum would move removed weights away from zero.
    assert all((optimizer.state[w]["exp_avg"] != 0).all() for w in training.weights.values())
    train_steps(model, training, optimizer, range(4, 5))
    masks = copy.deepcopy(training.masks)
    assert zeros(training) == 200
    for step in range(5, 25):
        train_steps(model, training, optimizer, range(step, step + 1))
        assert all((values == 0).all() for values in removed_of(training).values())
        assert all((weight[masks[name]] != 0).all() for name, weight in training.weights.items())
    assert all(torch.equal(training.masks[name], masks[name]) for name in masks)
    for name, weight in training.weights.items():
        for moment in ("exp_avg", "exp_avg_sq"):
            assert (optimizer.state[weight][moment][~masks[name]] == 0).all()


def test_the_optimizer_revives_removed_weights_without_masks():
    model = net()
    optimizer = adamw(model)
    for step in range(5):
        backward(model, step)
        optimizer.step()
    sparsify(model, HALF, select=everything)
    backward(model, 5)
    optimizer.step()
    assert max(compute_zero_shares(model, everything).values()) < 0.05  # shows that the previous test can fail


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_masked_training_equals_training_of_the_remaining_weights(momentum):
    model, plain = net(), net()
    training = prepare_sparse(model, HALF, select=everything)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=momentum, weight_decay=0.1)
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    buffers = {name: torch.zeros_like(value) for name, value in values.items()}
    for step in range(4):
        train_steps(model, training, optimizer, range(step, step + 1))
        leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
        used = {name: leaf * training.masks[name] if name in training.masks else leaf for name, leaf in leaves.items()}
        inputs, targets = data(step)
        loss = (torch.func.functional_call(plain, used, inputs) - targets).square().mean()
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        for (name, value), gradient in zip(values.items(), gradients, strict=True):
            buffers[name] = momentum * buffers[name] + gradient + 0.1 * value
            values[name] = value - 0.05 * buffers[name]
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), values[name])


class GradientFreeOptimizer(Optimizer):
    """An optimizer that moves every weight regardless of its gradient, as with noise or weight averaging."""

    def __init__(self, parameters: Any):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter += 0.1


def test_removed_weights_stay_zero_under_an_optimizer_that_ignores_gradients():
    model = net()
    training = prepare_sparse(model, HALF, select=everything)
    train_steps(model, training, GradientFreeOptimizer(model.parameters()), range(2))
    assert all((values == 0).all() for values in removed_of(training).values())


def test_averaged_weights_have_the_zeros_too():
    """The optimizer ignores gradients, so that the averages are taken of weights that aren't zero."""
    model = net()
    training = prepare_sparse(model, HALF, select=everything)
    optimizer = GradientFreeOptimizer(model.parameters())
    average = WeightAverage(optimizer, 0.5)
    train_steps(model, training, optimizer, range(4))
    average.eval()
    assert all(not values.any() for values in removed_of(training).values())
    assert model[0].weight.any()


@pytest.mark.slow
def test_moments_in_few_bits_of_removed_weights_are_zero():
    from torchao.optim import AdamW8bit

    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 8))
    training = prepare_sparse(model, SparsitySchedule(amount=0.5, begin=0, end=2), select=everything)
    optimizer = AdamW8bit(model.parameters(), lr=0.01)
    for step in range(4):
        model.zero_grad()
        model(torch.randn(16, 64, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        training.after_backward()
        optimizer.step()
        training.after_step(optimizer)
    moment = optimizer.state[model[0].weight]["exp_avg"].dequantize()
    assert not moment[~training.masks["0.weight"]].any()
    assert moment.any()


def test_gradients_of_removed_weights_are_zeroed_after_backward():
    model = net()
    training = prepare_sparse(model, HALF, select=everything)
    backward(model, 0)
    dense = model[0].weight.grad.clone()
    assert (dense[~training.masks["0.weight"]] != 0).all()
    training.after_backward()
    assert torch.equal(model[0].weight.grad, dense.masked_fill(~training.masks["0.weight"], 0))


def test_a_step_without_after_backward_is_rejected():
    model = net()
    training = prepare_sparse(model, HALF, select=everything)
    with pytest.raises(CompressError, match="after_backward"):
        training.after_step(adamw(model))


def test_an_attached_optimizer_with_a_closure_equals_manual_calls():
    by_hand, by_hook = net(), net()
    config = SparsitySchedule(amount=0.8, begin=2, end=8, every=2)
    first, second = (prepare_sparse(model, config, select=everything) for model in (by_hand, by_hook))
    train_steps(by_hand, first, adamw(by_hand), range(10))
    optimizer = adamw(by_hook)
    second.attach(optimizer)
    for step in range(10):

        def closure(step: int = step) -> None:  # as in Lightning: the backward pass runs inside the optimizer's step
            backward(by_hook, step)
            second.after_backward()

        optimizer.step(closure)
    assert all(torch.equal(a, b) for a, b in zip(by_hand.parameters(), by_hook.parameters(), strict=True))
    convert_sparse(second)
    backward(by_hook, 0)
    optimizer.step()
    assert second.step == 10  # the hook has been removed


# ---- schedules


@pytest.mark.parametrize("pattern", ["unstructured", "2:4", "4x1"])
def test_the_sparse_share_follows_the_schedule_and_no_weight_comes_back(pattern):
    config = SparsitySchedule(pattern=pattern, amount=None if ":" in pattern else 0.8, begin=2, end=12, every=2)
    model = net()
    optimizer, training = adamw(model), prepare_sparse(model, config, select=everything)
    area = config.block[0] * config.block[1]
    removed = {name: torch.zeros_like(mask) for name, mask in training.masks.items()}
    for step in range(1, 16):
        train_steps(model, training, optimizer, range(step - 1, step))
        last = min(step // 2 * 2, 12)
        for name, mask in training.masks.items():
            assert int((~mask).sum()) == round(config.compute_share(last) * mask.numel() / area) * area
            assert mask[removed[name]].sum() == 0
            removed[name] = ~mask
    assert (model[0].weight == 0).double().mean() == config.final_share


def test_removed_weights_stay_removed_even_if_a_live_one_is_zero():
    config = SparsitySchedule(amount=0.75, initial=0.5, begin=2, end=2)
    model = nn.Sequential(nn.Linear(4, 1, bias=False))
    model[0].weight.data = torch.tensor([[3.0, 2.0, 0.1, 0.2]])
    training = prepare_sparse(model, config, select=everything)
    assert training.masks["0.weight"].tolist() == [[True, True, False, False]]
    optimizer = SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        model[0].weight.data[0] = 0
        model(torch.ones(1, 4)).sum().backward()
        training.after_backward()
        optimizer.step()
        training.after_step(optimizer)
    assert training.masks["0.weight"].tolist() == [[False, True, False, False]]


# ---- movement


def test_movement_scores_are_minus_weight_times_gradient_through_the_masks():
    """Compares with Sanh et al.: a dense weight, masked in the forward pass, with a straight-through backward pass."""
    config = SparsitySchedule(amount=0.6, score="movement", begin=2, end=8, every=2)
    model = net()
    optimizer, training = SGD(model.parameters(), lr=0.1), prepare_sparse(model, config, select=everything)
    layers = {"0.weight": model[0], "2.weight": model[2]}
    dense = {name: layer.weight.detach().clone() for name, layer in layers.items()}
    biases = {f"{name[0]}.bias": layer.bias.detach().clone() for name, layer in layers.items()}
    masks = {name: torch.ones_like(value) for name, value in dense.items()}
    scores = {name: torch.zeros_like(value) for name, value in dense.items()}
    came_back = False
    for step in range(10):
        train_steps(model, training, optimizer, range(step, step + 1))
        used = {name: (value * masks[name]).requires_grad_() for name, value in dense.items()}
        used |= {name: value.clone().requires_grad_() for name, value in biases.items()}
        inputs, targets = data(step)
        loss = (torch.func.functional_call(net(), used, inputs) - targets).square().mean()
        gradients = dict(zip(used, torch.autograd.grad(loss, list(used.values())), strict=True))
        for name in dense:
            if step < 8:  # scores aren't needed after the end
                scores[name] -= dense[name] * gradients[name]
            dense[name] = dense[name] - 0.1 * gradients[name] * masks[name]
            if step + 1 in (2, 4, 6, 8):
                count = round(config.compute_share(step + 1) * scores[name].numel())
                mask = torch.ones_like(masks[name]).flatten()
                mask[scores[name].flatten().argsort()[:count]] = 0
                came_back |= bool(((masks[name] == 0) & (mask.view_as(masks[name]) == 1)).any())
                masks[name] = mask.view_as(masks[name])
        biases = {name: value - 0.1 * gradients[name] for name, value in biases.items()}
        for name in dense:
            torch.testing.assert_close(training.scores[name], scores[name])
            assert torch.equal(training.masks[name], masks[name].bool())
            torch.testing.assert_close(layers[name].weight.detach(), dense[name] * masks[name])
    assert came_back  # otherwise the stored values of removed weights were never used


def test_movement_removes_large_weights_that_shrink():
    model = nn.Sequential(nn.Linear(2, 1, bias=False))
    model[0].weight.data = torch.tensor([[3.0, 0.1]])
    optimizer = SGD(model.parameters(), lr=0.01)
    training = prepare_sparse(model, SparsitySchedule(amount=0.5, score="movement", end=1), select=everything)
    (model(torch.eye(2))[:, 0] - torch.tensor([0.0, 1.0])).square().sum().backward()
    training.after_backward()  # gradients 6 and -1.8: scores -18 and 0.18
    torch.testing.assert_close(training.scores["0.weight"], torch.tensor([[-18.0, 0.18]]))
    optimizer.step()
    training.after_step(optimizer)
    assert training.masks["0.weight"].tolist() == [[False, True]]


# ---- rewiring


def test_rewiring_keeps_the_number_of_weights_and_grows_the_largest_gradients():
    model = net()
    optimizer, training = adamw(model), prepare_sparse(model, RIGL, select=everything)
    counts = {name: int(mask.sum()) for name, mask in training.masks.items()}
    grown = 0
    for step in range(1, 21):
        backward(model, step)
        gradients = {name: weight.grad.abs().clone() for name, weight in training.weights.items()}
        training.after_backward()
        optimizer.step()
        sizes = {name: weight.detach().abs().clone() for name, weight in training.weights.items()}
        before = training.masks
        training.after_step(optimizer)
        for name, mask in training.masks.items():
            assert int(mask.sum()) == counts[name]
            if step not in (4, 8, 12):
                assert torch.equal(mask, before[name])
                continue
            count = int(RIGL.compute_rewiring_share(step) * counts[name])
            alive = before[name].clone()
            smallest = sizes[name].masked_fill(~alive, torch.inf).flatten().argsort()[:count]
            alive.view(-1)[smallest] = False
            wanted = gradients[name].masked_fill(alive, -1).flatten().argsort(descending=True)[:count]
            alive.view(-1)[wanted] = True
            assert torch.equal(mask, alive)
            new = mask & ~before[name]
            grown += int(new.sum())
            weight = training.weights[name].detach()
            assert (weight[new] == 0).all()
            assert (optimizer.state[training.weights[name]]["exp_avg"][new] == 0).all()
            assert (weight[~mask] == 0).all()
            assert torch.equal(weight[mask & before[name]].abs(), sizes[name][mask & before[name]])
    assert grown > 10
    # Grown weights start at zero and are trained.
    assert all((weight[training.masks[name]] != 0).all() for name, weight in training.weights.items())


def test_rewiring_drops_the_smallest_and_grows_the_largest_gradient_units():
    alive = torch.tensor([[True, True, True, False, False, False]])
    sizes = torch.tensor([[0.5, 0.1, 0.9, 0.0, 0.0, 0.0]])
    gradients = torch.tensor([[9.0, 0.2, 9.0, 0.3, 0.7, 0.1]])
    assert rewire_units(alive, sizes, gradients, 0.34).tolist() == [[True, False, True, False, True, False]]
    assert rewire_units(alive, sizes, gradients, 0.33).tolist() == alive.tolist()
    gradients[0, 1] = 0.8  # the dropped weight is the best to grow back
    assert rewire_units(alive, sizes, gradients, 0.34).tolist() == alive.tolist()


def test_rewiring_moves_whole_blocks():
    config = SparsitySchedule(pattern="4x1", amount=0.8, rewire=0.5, end=20, every=2)
    model = net()
    training = prepare_sparse(model, config, select=everything)
    first = copy.deepcopy(training.masks)
    train_steps(model, training, adamw(model), range(6))
    for name, mask in training.masks.items():
        blocks = mask.view(-1, 4, mask.shape[1])
        assert (blocks.all(1) | ~blocks.any(1)).all()
        assert mask.sum() == first[name].sum()
        assert not torch.equal(mask, first[name])


# ---- masks from elsewhere


@pytest.mark.parametrize("score", ["wanda", "sparsegpt"])
def test_masks_of_a_calibrated_model_are_kept_in_training(tiny_model, token_batch, score):
    model, config = tiny_model("bert"), SparsitySchedule(pattern="2:4", score=score)
    with pytest.raises(CompressError, match="sparsify"):
        prepare_sparse(model, config)
    masks = sparsify(model, config, [token_batch])
    before = {name: model.get_parameter(name).detach().clone() for name in masks}
    optimizer, training = adamw(model), prepare_sparse(model, config, masks=masks)
    assert all(torch.equal(model.get_parameter(name), value) for name, value in before.items())
    for _ in range(3):
        model.zero_grad()
        model(**token_batch).logits.square().sum().backward()
        training.after_backward()
        optimizer.step()
        training.after_step(optimizer)
    for name, mask in masks.items():
        assert torch.equal(model.get_parameter(name) != 0, mask)
        assert not torch.equal(model.get_parameter(name), before[name])


def test_masks_of_other_weights_are_rejected():
    model = net()
    masks = sparsify(model, HALF, select=everything)
    with pytest.raises(CompressError, match="'2.weight'"):
        prepare_sparse(model, HALF, masks=masks, select=lambda name, layer: name == "0")
    with pytest.raises(CompressError, match="'0.weight'"):
        prepare_sparse(model, HALF, masks={**masks, "0.weight": torch.ones(3, 3).bool()}, select=everything)


def test_rewiring_a_frozen_weight_is_rejected():
    model = net()
    model[0].weight.requires_grad_(False)
    training = prepare_sparse(model, RIGL, select=everything)
    training.step = 3
    backward(model, 0)
    with pytest.raises(CompressError, match=r"'0.weight'.*gradient"):
        training.after_backward()


# ---- stopping and resuming

RESUMED = {
    "gradual": SparsitySchedule(amount=0.8, begin=2, end=14, every=3),
    "gradual 2:4": SparsitySchedule(pattern="2:4", begin=2, end=14, every=3),
    "movement": SparsitySchedule(amount=0.6, score="movement", begin=1, end=14, every=2),
    "movement 4x1": SparsitySchedule(pattern="4x1", amount=0.6, score="movement", begin=1, end=14, every=2),
    "rewired": RIGL,
}


@pytest.mark.parametrize("name", list(RESUMED))
def test_a_resumed_training_ends_with_the_same_bits(name, tmp_path: Path):
    def start() -> tuple[nn.Module, SparseTraining, Optimizer]:
        model = net()
        return model, prepare_sparse(model, RESUMED[name], select=everything), adamw(model)

    def bits(model: nn.Module) -> list[Tensor]:
        return [value.view(torch.int32) for value in model.state_dict().values()]

    whole = start()
    train_steps(*whole, range(18))
    for stop in (1, 5, 9):
        model, training, optimizer = start()
        train_steps(model, training, optimizer, range(stop))
        parts = {"model": model.state_dict(), "sparse": training.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(parts, tmp_path / "state.pt")
        model, training, optimizer = start()
        read: dict[str, Any] = torch.load(tmp_path / "state.pt", weights_only=True)
        model.load_state_dict(read["model"])
        training.load_state_dict(read["sparse"])
        optimizer.load_state_dict(read["optimizer"])
        train_steps(model, training, optimizer, range(stop, 18))
        assert all(torch.equal(a, b) for a, b in zip(bits(model), bits(whole[0]), strict=True)), stop
        assert all(torch.equal(training.masks[key], whole[1].masks[key]) for key in training.masks), stop


def test_a_saved_state_does_not_change_when_training_continues():
    model = net()
    optimizer, training = adamw(model), prepare_sparse(model, RESUMED["movement"], select=everything)
    train_steps(model, training, optimizer, range(3))
    state = training.state_dict()
    snapshot = copy.deepcopy(state)
    train_steps(model, training, optimizer, range(3, 8))
    for part in ("masks", "scores", "removed"):
        assert all(torch.equal(state[part][name], snapshot[part][name]) for name in snapshot[part])


def test_a_state_of_another_config_or_model_is_rejected():
    state = prepare_sparse(net(), HALF, select=everything).state_dict()
    with pytest.raises(CompressError, match="another schedule"):
        prepare_sparse(net(), RIGL, select=everything).load_state_dict(state)
    with pytest.raises(CompressError, match="2.weight"):
        prepare_sparse(net(), HALF, select=lambda name, layer: name == "0").load_state_dict(state)


# ---- resulting checkpoints


@pytest.mark.parametrize("family", ["bert", "distilbert", "roberta"])
@pytest.mark.parametrize("pattern", ["unstructured", "2:4", "4x1"])
def test_the_exported_checkpoint_is_a_stock_one_with_zeros(tiny_model, token_batch, family, pattern, tmp_path: Path):
    model = tiny_model(family)
    stock = set(model.state_dict())
    config = SparsitySchedule(pattern=pattern, amount=None if ":" in pattern else 0.75, begin=1, end=3)
    optimizer, training = adamw(model), prepare_sparse(model, config)
    training.attach(optimizer)
    for _ in range(4):
        model.zero_grad()
        model(**token_batch).logits.square().sum().backward()
        training.after_backward()
        optimizer.step()
    assert convert_sparse(training) is model
    assert set(model.state_dict()) == stock
    assert not any(hasattr(module, "parametrizations") or module._forward_pre_hooks for module in model.modules())
    model.save_pretrained(tmp_path / "sparse")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "sparse")
    assert type(loaded) is type(model)
    shares = compute_zero_shares(loaded)
    assert set(shares.values()) == {config.final_share}
    assert len(shares) == 24
    for name in shares:
        assert torch.equal(loaded.get_parameter(name) != 0, training.masks[name])
    with torch.no_grad():
        assert torch.equal(loaded.eval()(**token_batch).logits, model(**token_batch).logits)


def test_converting_before_the_schedule_ends_is_rejected(tiny_model):
    model: BertForSequenceClassification = tiny_model("bert")
    training = prepare_sparse(model, SparsitySchedule(amount=0.8, begin=0, end=100))
    with pytest.raises(CompressError, match="expected at least 100 steps before `convert_sparse`, found 0"):
        convert_sparse(training)
