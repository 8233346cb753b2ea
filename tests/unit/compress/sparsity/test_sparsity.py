"""Tests settings, schedules and patterns of sparsity: exact numbers of zeros, in the right layers."""

import pytest
import torch

from compress.blocks import group_by_block
from compress.errors import CompressError
from compress.sparsity.layers import compute_zero_shares, find_sparsifiable_layers
from compress.sparsity.oneshot import sparsify
from compress.sparsity.patterns import choose_masks
from compress.sparsity.schedule import SparsitySchedule

SCORES = torch.randperm(12 * 20, generator=torch.Generator().manual_seed(3)).view(12, 20).float()


# ---- the settings


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"amount": 0.0}, "sparsity.amount"),
        ({"amount": 1.0}, "sparsity.amount"),
        ({"amount": -0.5}, "sparsity.amount"),
        ({}, "sparsity.amount"),
        ({"pattern": "2:4", "amount": 0.5}, "sparsity.amount"),
        ({"pattern": "4:4"}, "sparsity.pattern"),
        ({"pattern": "0:4"}, "sparsity.pattern"),
        ({"pattern": "0x4", "amount": 0.5}, "sparsity.pattern"),
        ({"pattern": 124, "amount": 0.5}, "quoted in YAML"),  # YAML parses 2:4 as 124
        ({"amount": 0.5, "score": "size"}, "sparsity.score"),
        ({"amount": 0.5, "scope": "column"}, "sparsity.scope"),
        ({"amount": 0.5, "initial": 0.5}, "sparsity.initial"),
        ({"amount": 0.5, "begin": 5, "end": 4}, "sparsity.end"),
        ({"amount": 0.5, "every": 0}, "sparsity.every"),
        ({"amount": 0.5, "score": "movement"}, "sparsity.end"),
        ({"amount": 0.5, "score": "movement", "end": 9, "initial": 0.1}, "sparsity.initial"),
        ({"amount": 0.5, "score": "sparsegpt", "pattern": "4x1"}, "sparsity.pattern"),
        ({"amount": 0.5, "score": "wanda", "scope": "global"}, "sparsity.scope"),
        ({"amount": 0.5, "rewire": 1.0, "end": 9}, "sparsity.rewire"),
        ({"amount": 0.5, "rewire": 0.3}, "sparsity.end"),
        ({"amount": 0.5, "rewire": 0.3, "end": 9, "scope": "row"}, "sparsity.rewire"),
        ({"pattern": "2:4", "rewire": 0.3, "end": 9}, "sparsity.rewire"),
    ],
)
def test_invalid_settings_are_rejected_by_name(settings, named):
    with pytest.raises(CompressError, match=named):
        SparsitySchedule(**settings)


def test_the_schedule_is_the_cubic_of_zhu_and_gupta():
    config = SparsitySchedule(amount=0.8, begin=10, end=110, every=25)
    assert [config.compute_share(step) for step in (0, 9, 10)] == [0, 0, 0]
    for step in range(10, 111):
        assert config.compute_share(step) == pytest.approx(0.8 + (0 - 0.8) * (1 - (step - 10) / 100) ** 3, abs=1e-12)
    assert config.compute_share(60) == pytest.approx(0.7)  # halfway: 7/8 of the amount
    assert config.compute_share(110) == config.compute_share(10**6) == 0.8
    assert [step for step in range(200) if config.is_due(step)] == [10, 35, 60, 85, 110]
    raised = SparsitySchedule(amount=0.8, initial=0.4, begin=10, end=110)
    assert [raised.compute_share(step) for step in (3, 60)] == pytest.approx([0.4, 0.8 - 0.4 / 8])


def test_the_last_step_is_due_even_if_every_does_not_divide_the_range():
    config = SparsitySchedule(amount=0.8, begin=0, end=10, every=4)
    assert [step for step in range(20) if config.is_due(step)] == [0, 4, 8, 10]


def test_the_rewired_share_falls_by_a_cosine():
    config = SparsitySchedule(amount=0.8, rewire=0.3, begin=100, end=300)
    assert [config.compute_rewiring_share(step) for step in (99, 100, 200, 300)] == pytest.approx([0, 0.3, 0.15, 0])
    assert config.compute_rewiring_share(150) == pytest.approx(0.15 * (1 + 0.5**0.5))
    assert config.compute_share(0) == 0.8


# ---- the patterns


@pytest.mark.parametrize("share", [0.1, 1 / 3, 0.5, 0.83])
def test_each_row_or_layer_loses_the_requested_number_of_lowest_weights(share):
    for scope, size in (("row", 20), ("layer", 240)):
        mask = choose_masks({"w": SCORES}, SparsitySchedule(amount=0.9, scope=scope), share)["w"]
        for kept, scores in zip(mask.view(-1, size), SCORES.view(-1, size), strict=True):
            assert int((~kept).sum()) == round(share * size)
            assert scores[~kept].max() < scores[kept].min()


def test_global_scope_compares_scores_across_layers():
    scores = {"low": SCORES, "high": SCORES + 1000}
    masks = choose_masks(scores, SparsitySchedule(amount=0.9, scope="global"), 0.4)
    assert int((~masks["low"]).sum()) == round(0.4 * 480)
    assert masks["high"].all()


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (1, 2), (2, 5), (4, 10)])
@pytest.mark.parametrize("scope", ["row", "layer"])
def test_every_group_of_m_keeps_its_n_highest_weights(n, m, scope):
    config = SparsitySchedule(pattern=f"{n}:{m}", scope=scope)
    mask = choose_masks({"w": SCORES}, config, config.final_share)["w"]
    groups, scores = mask.view(-1, m), SCORES.view(-1, m)
    assert (groups.sum(1) == n).all()
    assert (scores.masked_fill(~groups, torch.inf).amin(1) > scores.masked_fill(groups, -1).amax(1)).all()


def test_partial_2_4_sparsity_keeps_at_least_two_per_group_and_is_part_of_the_final_mask():
    mask = choose_masks({"w": SCORES}, SparsitySchedule(pattern="2:4"), 0.3)["w"]
    assert int((~mask).sum()) == round(0.3 * 240)
    assert (mask.view(-1, 4).sum(1) >= 2).all()
    final = choose_masks({"w": SCORES}, SparsitySchedule(pattern="2:4"), 0.5)["w"]
    assert not (final & ~mask).any()  # weights removed so far are also removed in the end


@pytest.mark.parametrize(("pattern", "rows", "columns"), [("4x1", 4, 1), ("1x4", 1, 4), ("2x2", 2, 2)])
def test_whole_blocks_with_the_lowest_sums_are_removed(pattern, rows, columns):
    mask = choose_masks({"w": SCORES}, SparsitySchedule(pattern=pattern, amount=0.8), 0.8)["w"]
    blocks = mask.view(12 // rows, rows, 20 // columns, columns).permute(0, 2, 1, 3).reshape(-1, 4)
    assert (blocks.all(1) | ~blocks.any(1)).all()
    assert int((~blocks.any(1)).sum()) == 48
    sums = SCORES.view(12 // rows, rows, 20 // columns, columns).sum((1, 3)).flatten()
    assert sums[~blocks.any(1)].max() <= sums[blocks.any(1)].min()


def test_equal_scores_keep_the_count_exact():
    assert int(choose_masks({"w": torch.ones(8, 8)}, SparsitySchedule(amount=0.5), 0.5)["w"].sum()) == 32
    assert (
        choose_masks({"w": torch.ones(8, 8)}, SparsitySchedule(pattern="2:4"), 0.5)["w"].view(-1, 4).sum(1) == 2
    ).all()


@pytest.mark.parametrize(
    ("pattern", "shape", "dimension"),
    [("2:4", (8, 6), "inputs"), ("1x4", (8, 6), "inputs"), ("4x1", (6, 8), "outputs")],
)
def test_a_size_that_the_pattern_does_not_divide_is_rejected(pattern, shape, dimension):
    amount = None if ":" in pattern else 0.5
    with pytest.raises(CompressError, match=f"weight 'odd'.*{dimension}.*found 6"):
        choose_masks({"odd": torch.ones(shape)}, SparsitySchedule(pattern=pattern, amount=amount), 0.5)


def test_nan_scores_are_rejected():
    with pytest.raises(CompressError, match="'w'.*NaN"):
        choose_masks({"w": torch.tensor([[1.0, torch.nan]])}, SparsitySchedule(amount=0.5), 0.5)


# ---- which layers


def test_only_linear_layers_of_the_encoder_become_sparse(teacher):
    names = find_sparsifiable_layers(teacher)
    assert len(names) == 4 * 6
    assert all(".layer." in name for name in names)
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    sparsify(teacher, SparsitySchedule(amount=0.5))
    changed = {name for name, value in teacher.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {f"{name}.weight" for name in names}
    assert set(compute_zero_shares(teacher).values()) == {0.5}


def test_a_filter_selects_the_layers_to_sparsify(tiny_model):
    model = tiny_model("bert")
    masks = sparsify(
        model, SparsitySchedule(pattern="2:4"), select=lambda name, layer: name.endswith("intermediate.dense")
    )
    assert len(masks) == 4
    assert {name for name, share in compute_zero_shares(model).items() if share} == set(masks)
    with pytest.raises(CompressError, match="found none"):
        sparsify(model, SparsitySchedule(amount=0.5), select=lambda name, layer: False)


def test_layers_are_grouped_by_block_of_the_model(tiny_model):
    groups = group_by_block(find_sparsifiable_layers(tiny_model("bert")))
    assert [len(group) for group in groups] == [6] * 4
    assert all(f".layer.{i}." in name for i, group in enumerate(groups) for name in group)
