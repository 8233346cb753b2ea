"""Tests budgets: parsing, cost models, allocation with the least loss, and candidates that never exceed the budget."""

import statistics
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from compress.errors import CompressError
from compress.prune import budget as budgets
from compress.prune.budget import THROUGHPUT_BATCH, Budget, parse_bytes
from compress.prune.importance.estimate import score_by_magnitude
from compress.prune.search.allocate import LayerOptions, Limit, allocate
from compress.prune.search.candidates import (
    FFN_RATIO,
    MIN_BUDGET_USE,
    SearchSpace,
    get_sizes,
    list_candidates,
    list_layer_options,
    make_first_units_shape,
    make_smallest_candidate,
    reallocate,
)
from compress.prune.search.cost import (
    CostModel,
    ModelSizes,
    compute_features,
    fit_costs,
    plan_measurements,
    predict_slowest,
)
from distill.slicing import Shape, find_axes, prune
from distill.slicing.spacing import space_layers_evenly
from support.tiny_models import build_model

# 1 + 0.01 per coordinate; per layer 0.1 + 0.2 per head + 0.01 per neuron (a small part of which depends on width)
COSTS = CostModel((1.0, 0.01, 0.1, 0.0, 0.2, 0.001, 0.01, 0.0001), 0.0)
BYTES = CostModel((500.0, 300.0, 10.0, 4.0, 0.0, 32.0, 1.0, 2.0), 0.0)  # mostly the embedding table


# --- requested budgets


@pytest.mark.parametrize(
    ("text", "count"), [("10MB", 10_000_000), ("8MiB", 8 << 20), ("1.5 kB", 1500), ("700", 700), ("2GB", 2_000_000_000)]
)
def test_sizes_with_decimal_and_binary_units_are_parsed(text, count):
    assert parse_bytes(text) == count
    assert Budget(speedup="2", max_bytes=text).find_max_bytes() == count


def test_sizes_are_paired_with_speedups_in_the_order_given():
    family = Budget(speedup="10,4,2", max_bytes="1MB, 2MB,3MB")
    assert [family.find_max_bytes(each) for each in family.speedups] == [3_000_000, 2_000_000, 1_000_000]
    assert Budget(speedup="4,10", max_bytes="5MB").find_max_bytes(4) == 5_000_000
    assert Budget(latency_ms=2).find_max_bytes() is None
    with pytest.raises(CompressError, match="expected one size, or one for each of 2,4,8, found '1MB,2MB'"):
        Budget(speedup="2,4,8", max_bytes="1MB,2MB")


@pytest.mark.parametrize("text", ["ten", "10XB", "MB", "-3MB", "1e6"])
def test_invalid_sizes_are_rejected(text):
    with pytest.raises(CompressError, match="expected a size such as 10MB"):
        Budget(speedup="2", max_bytes=text)


def test_speedups_are_sorted():
    assert Budget(speedup="15, 2,4.0,8").speedups == (2.0, 4.0, 8.0, 15.0)
    assert not Budget().requested
    assert Budget(latency_ms=2.5).requested


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speedup": "ten"}, "expected numbers such as 10 or 2,4,8,15, found 'ten'"),
        ({"speedup": "0.5"}, "expected more than 1, found 0.5"),
        ({"speedup": "4", "latency_ms": 2}, "found speedup and latency_ms: all but one of them would be ignored"),
        ({"latency_ms": 2, "texts_per_second": 9}, "found latency_ms and texts_per_second"),
        ({"texts_per_second": -1}, "budget.texts_per_second: expected more than 0"),
        ({"speedup": "4", "retries": -1}, "budget.retries: expected at least 0"),
        ({"speedup": "4", "length": "16,x"}, "a number of tokens, or several such as 16,64,256, found '16,x'"),
        ({"speedup": "4", "length": "16,64,16"}, "expected different lengths"),
        (
            {"speedup": "2,4,8,4.0", "max_bytes": "1MB,2MB,3MB"},
            "expected different speed-ups, found 4 twice in '2,4,8,4.0'",
        ),
        ({"latency_ms": -1}, "expected more than 0"),
        ({"min_score_share": 98}, "a share from 0 to 1"),
        ({"threads": 0}, "budget.threads: expected at least 1"),
        ({"runtime": "tensorrt"}, "expected onnxruntime, openvino, pytorch, found 'tensorrt'"),
        ({"runtime": "pytorch", "precision": "int8"}, "expected runtime onnxruntime, found pytorch"),
    ],
)
def test_invalid_budgets_are_rejected(settings, message):
    with pytest.raises(CompressError, match=message):
        Budget(**settings)


def test_a_runtime_that_is_not_installed_is_rejected(monkeypatch):
    monkeypatch.setattr(budgets, "find_spec", lambda name: None)
    with pytest.raises(CompressError, match=r"not installed here.*pip install -e '.\[openvino\]'"):
        Budget(speedup="4", runtime="openvino")


def test_the_default_precision_depends_on_the_runtime():
    assert Budget(speedup="4").resolve().precision == "int8"
    assert Budget(speedup="4", runtime="pytorch").resolve().precision == "fp32"


def test_the_default_batch_is_one_text_and_of_a_throughput_several():
    assert Budget(speedup="4").resolve().batch == 1
    assert Budget(texts_per_second=500).resolve().batch == THROUGHPUT_BATCH
    assert Budget(texts_per_second=500, batch=8).resolve().batch == 8


def test_lengths_are_sorted_and_a_single_one_is_stored_as_a_number():
    assert Budget(length="64, 16,256").lengths == (16, 64, 256)
    assert Budget(length="64,16").timing_settings()["length"] == [16, 64]
    assert Budget(length="64").timing_settings()["length"] == 64


# --- cost models


def test_fitted_costs_predict_the_costs_they_were_computed_from():
    full = ModelSizes(64, (8,) * 4, (256,) * 4)
    all_sizes = plan_measurements(full, step=8)
    fitted = fit_costs(all_sizes, [COSTS.predict(each) for each in all_sizes])
    unseen = [ModelSizes(48, (3, 8, 1), (200, 16, 100)), full, ModelSizes(8, (1,), (1,))]
    for each in unseen:
        assert fitted.predict(each) == pytest.approx(COSTS.predict(each), rel=1e-6)
    assert fitted.error < 1e-9


def test_coefficients_fitted_to_noisy_times_are_never_negative():
    all_sizes = plan_measurements(ModelSizes(64, (8,) * 4, (256,) * 4), step=8)
    noise = np.random.default_rng(0).normal(1, 0.1, len(all_sizes))
    fitted = fit_costs(all_sizes, [COSTS.predict(each) * n for each, n in zip(all_sizes, noise, strict=True)])
    assert min(fitted.coefficients) >= 0
    assert 0.005 < fitted.error < 0.2


def test_times_of_zero_are_rejected():
    with pytest.raises(CompressError, match="expected times above 0 ms"):
        fit_costs([ModelSizes(8, (1,), (1,))] * 2, [1.0, 0.0])


def test_planned_sizes_never_exceed_each_layers_own_size():
    full = ModelSizes(64, (8, 2, 1), (256, 16, 1))
    for each in plan_measurements(full, step=8):
        assert all(units <= available for units, available in zip(each.heads, full.heads, strict=False))
        assert all(units <= available for units, available in zip(each.ffn, full.ffn, strict=False))
    assert ModelSizes(64, (8, 2), (128, 8)) in plan_measurements(full, step=8)


def test_the_plan_determines_every_cost_coefficient():
    all_sizes = plan_measurements(ModelSizes(384, (12,) * 6, (1536,) * 6), step=32)
    rows = np.stack([compute_features(each) for each in all_sizes])
    assert len(set(all_sizes)) == len(all_sizes) <= 12
    assert np.linalg.matrix_rank(rows / rows.max(0), tol=1e-3) == rows.shape[1]
    assert {each.hidden for each in all_sizes} == {384, 192, 96}


def test_planned_widths_are_the_models_width_and_multiples_of_the_step():
    assert {each.hidden for each in plan_measurements(ModelSizes(640, (4,) * 3, (2048,) * 3), step=256)} == {640, 256}
    assert {each.hidden for each in plan_measurements(ModelSizes(96, (2,) * 2, (384,) * 2), step=64)} == {96, 64}


# --- the solver


def some_options(seed: int, layers: int = 3) -> list[LayerOptions]:
    rng = np.random.default_rng(seed)

    def losses(count: int) -> tuple[float, ...]:
        return tuple(sorted(rng.uniform(0, 3, count), reverse=True)[:-1]) + (0.0,)

    return [LayerOptions((1, 2, 4), (8, 16, 32), losses(3), losses(3), float(rng.uniform(1, 8))) for _ in range(layers)]


def every_choice(options: list[LayerOptions], depth: int, uniform: bool):
    """Yields (layers, heads, ffn, loss) of every possible choice."""
    total = sum(each.layer_loss for each in options)
    for mask in (k for k in product((0, 1), repeat=len(options)) if sum(k) == depth):
        layers = [i for i, is_kept in enumerate(mask) if is_kept]
        for picks in product(product(range(3), range(3)), repeat=depth):
            if uniform and len(set(picks)) > 1:
                continue
            loss = total + sum(
                options[n].heads_loss[h] + options[n].ffn_loss[f] - options[n].layer_loss
                for n, (h, f) in zip(layers, picks, strict=True)
            )
            heads, ffn = ([options[0].heads[h] for h, _ in picks], [options[0].ffn[f] for _, f in picks])
            yield tuple(layers), tuple(heads), tuple(ffn), loss


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_allocation_within_the_time_limit_has_the_least_loss(seed, uniform):
    options = some_options(seed)
    for depth, milliseconds in ((1, 1.9), (2, 2.6), (2, 3.4), (3, 4.0)):
        within = [
            (loss, layers, heads, ffn)
            for layers, heads, ffn, loss in every_choice(options, depth, uniform)
            if COSTS.predict(ModelSizes(16, heads, ffn)) <= milliseconds
        ]
        allocation = allocate(options, [COSTS], 16, depth, milliseconds, uniform=uniform)
        if not within:
            assert allocation is None
            continue
        assert allocation is not None
        assert allocation.loss == pytest.approx(min(within)[0])
        assert allocation.milliseconds == pytest.approx(COSTS.predict(ModelSizes(16, allocation.heads, allocation.ffn)))
        assert allocation.milliseconds <= milliseconds + 1e-9
        assert not uniform or len(set(allocation.heads)) == len(set(allocation.ffn)) == 1


@pytest.mark.parametrize("seed", range(4))
def test_allocation_within_time_and_byte_limits_has_the_least_loss(seed):
    options, milliseconds = some_options(seed), 3.4
    for max_bytes in (7000, 8500, 12000):
        within = [
            loss
            for _, heads, ffn, loss in every_choice(options, 2, False)
            if COSTS.predict(ModelSizes(16, heads, ffn)) <= milliseconds
            and BYTES.predict(ModelSizes(16, heads, ffn)) <= max_bytes
        ]
        allocation = allocate(options, [COSTS], 16, 2, milliseconds, size=Limit(BYTES, max_bytes))
        assert (allocation is None) == (not within)
        if allocation is not None:
            assert allocation.loss == pytest.approx(min(within))
            assert BYTES.predict(ModelSizes(16, allocation.heads, allocation.ffn)) <= max_bytes


def test_allocation_holds_the_slowest_of_several_lengths_to_the_time_limit():
    long = CostModel((0.5, 0.005, 0.4, 0.0, 0.1, 0.001, 0.03, 0.0001), 0.0)  # neurons cost more, heads less
    costs, milliseconds, added = [COSTS, long], 3.4, []
    for seed in range(4):
        options = some_options(seed)
        within = [
            loss
            for _, heads, ffn, loss in every_choice(options, 2, False)
            if max(each.predict(ModelSizes(16, heads, ffn)) for each in costs) <= milliseconds
        ]
        allocation = allocate(options, costs, 16, 2, milliseconds)
        assert allocation.loss == pytest.approx(min(within))
        assert allocation.milliseconds == pytest.approx(
            predict_slowest(costs, ModelSizes(16, allocation.heads, allocation.ffn))
        )
        assert allocation.milliseconds <= milliseconds + 1e-9
        added.append(allocation.loss - max(allocate(options, [each], 16, 2, milliseconds).loss for each in costs))
    assert min(added) > -1e-9
    assert max(added) > 1e-3, "no model meets the limits of both lengths that is best for one of them"


def test_scaled_costs_predict_the_scaled_time():
    sizes = ModelSizes(16, (2,), (8,))
    assert COSTS.scale(0.25).predict(sizes) == pytest.approx(COSTS.predict(sizes) / 4)


def test_allocation_keeps_exactly_the_requested_layers():
    options = some_options(1)
    for fixed_layers in ((0, 1), (0, 2), (1, 2)):
        allocation = allocate(options, [COSTS], 16, 2, 3.4, fixed_layers=fixed_layers)
        assert allocation is not None
        assert allocation.layers == fixed_layers


def test_a_uniform_allocation_of_layers_of_different_sizes_has_only_sizes_that_all_have():
    small = LayerOptions((1, 2, 4), (8, 12), (2.0, 1.0, 0.0), (0.5, 0.0), 4.0)
    large = LayerOptions((1, 2, 4), (4, 8, 12, 16), (3.0, 2.0, 0.0), (9.0, 6.0, 1.0, 0.0), 5.0)
    for layers in ([small, large], [large, small]):
        whole = allocate(layers, [COSTS], 16, 2, 100.0, uniform=True)
        assert (whole.heads, whole.ffn, whole.loss) == ((4, 4), (12, 12), 1.0), (
            "the loss of each layer's own 12 neurons"
        )
        assert whole.layers == (0, 1)
        least = COSTS.predict(ModelSizes(16, (1, 1), (8, 8)))
        assert allocate(layers, [COSTS], 16, 2, least, uniform=True).ffn == (8, 8), "not all have 4"
        assert allocate(layers, [COSTS], 16, 2, 0.99 * least, uniform=True) is None


def test_a_uniform_allocation_of_layers_without_a_common_size_is_rejected():
    three, four = (LayerOptions((heads,), (8, 16), (0.0,), (1.0, 0.0), 4.0) for heads in (3, 4))
    with pytest.raises(CompressError, match=r"budget.uniform: expected a number of heads .* at most 3, 4: "):
        allocate([three, four], [COSTS], 16, 1, 100.0, uniform=True)


def test_allocation_returns_none_when_nothing_fits():
    assert allocate(some_options(0), [COSTS], 16, 1, 1.0) is None


# --- candidates


@pytest.fixture(scope="module")
def space() -> SearchSpace:
    model = build_model("bert")
    axes = find_axes(model)
    scores = score_by_magnitude(model, axes)
    return SearchSpace(axes, scores, [COSTS], 8)


def whole_ms(space: SearchSpace) -> float:
    return COSTS.predict(get_sizes(space.axes))


def test_candidates_spend_the_budget_without_exceeding_it(space):
    budget = whole_ms(space) / 2
    candidates = list_candidates(space, budget)
    assert len(candidates) > 3
    for each in candidates:
        assert MIN_BUDGET_USE * budget <= COSTS.predict(each.sizes) <= budget + 1e-9
        assert FFN_RATIO[0] <= sum(each.sizes.ffn) / each.sizes.depth / each.sizes.hidden <= FFN_RATIO[1]
    assert len({each.label for each in candidates}) == len(candidates), "each is tried once"
    assert len({each.sizes.hidden for each in candidates}) > 1
    assert len({each.sizes.depth for each in candidates}) > 1


@pytest.mark.parametrize("neurons", [512, 1000, 2048, 4096])
def test_options_include_all_neurons_when_the_step_does_not_divide_their_number(neurons):
    model = build_model("bert", intermediate_size=neurons)
    axes = find_axes(model)
    space = SearchSpace(axes, score_by_magnitude(model, axes), [COSTS], 24)  # a step that doesn't divide the width
    assert space.list_widths()[0] == space.hidden
    assert all(each.ffn[-1] == neurons for each in list_layer_options(space, space.hidden))


@pytest.mark.parametrize(
    ("neurons", "multiple", "step"),
    [(4096, 32, 96), (1152, 32, 32), (4096, 4, 88), (8, 16, 16), (85, 1, 1)],
)
def test_numbers_of_neurons_are_multiples_of_what_quantization_and_sparsity_require(neurons, multiple, step):
    model = build_model("bert", intermediate_size=neurons)
    axes = find_axes(model)
    space = SearchSpace(axes, score_by_magnitude(model, axes), [COSTS], 8, ffn_multiple=multiple)
    for each in list_layer_options(space, space.hidden):
        assert each.ffn == (*range(step, neurons, step), neurons)


@pytest.mark.slow
def test_candidates_and_reallocations_respect_the_byte_limit(space):
    free = list_candidates(space, whole_ms(space) / 2)
    max_bytes = statistics.median(BYTES.predict(each.sizes) for each in free)
    bound = replace(space, size=Limit(BYTES, max_bytes))
    candidates = list_candidates(bound, whole_ms(space) / 2)
    assert candidates
    assert all(BYTES.predict(each.sizes) <= max_bytes for each in candidates)
    assert {each.sizes.hidden for each in candidates} < {each.sizes.hidden for each in free}, "none is narrower"
    again = reallocate(bound, candidates[0], 2 * whole_ms(space))
    assert again is not None
    assert BYTES.predict(again.sizes) <= max_bytes


def test_a_candidates_model_has_the_planned_sizes_and_its_most_important_units(space):
    model = build_model("bert")
    for each in list_candidates(space, whole_ms(space) / 2)[:4]:
        cut = prune(model, space.axes, each.shape)
        assert get_sizes(find_axes(cut)) == each.sizes
        for name, units in each.shape.kept.items():
            scores = space.scores.values[name]
            removed = np.setdiff1d(np.arange(len(scores)), units.numpy())
            assert scores[units].min() >= scores[removed].max(), "a removed unit scores above a retained one"


@pytest.mark.slow
def test_uniform_candidates_fit_the_stock_class():
    model = build_model("bert")
    axes = find_axes(model)
    space = SearchSpace(axes, score_by_magnitude(model, axes), [COSTS], 8, uniform=True)
    candidates = list_candidates(space, whole_ms(space) / 2)
    assert candidates
    for each in candidates:
        assert len(set(each.sizes.heads)) == len(set(each.sizes.ffn)) == 1
        prune(model, axes, each.shape, uniform=True)


def test_uniform_candidates_of_a_model_with_different_layers_fit_the_stock_class():
    whole = build_model("bert")
    kept = {f"layers.{layer}.ffn": torch.arange(count) for layer, count in ((0, 48), (2, 24))}
    model = prune(whole, find_axes(whole), Shape((0, 1, 2, 3), kept))
    axes = find_axes(model)
    space = SearchSpace(axes, score_by_magnitude(model, axes), [COSTS], 8, uniform=True)
    candidates = list_candidates(space, 0.7 * whole_ms(space))
    assert candidates
    for each in candidates:
        stock = prune(model, axes, each.shape, uniform=True)
        assert type(stock) is type(whole)
        assert {layer.intermediate.dense.out_features for layer in stock.bert.encoder.layer} == {each.sizes.ffn[0]}


def test_reallocation_to_a_smaller_budget_keeps_layers_and_width(space):
    first = list_candidates(space, whole_ms(space) / 2)[0]
    less = reallocate(space, first, first.allocation.milliseconds * 0.9)
    assert less is not None
    assert (less.allocation.layers, less.sizes.hidden) == (first.allocation.layers, first.sizes.hidden)
    assert less.allocation.milliseconds <= first.allocation.milliseconds * 0.9
    assert reallocate(space, first, 0.01) is None


def test_the_smallest_candidate_has_one_layer_and_one_head(space):
    least = make_smallest_candidate(space)
    assert least.sizes.depth == 1
    assert least.sizes.heads == (1,)
    assert list_candidates(space, COSTS.predict(least.sizes) * 0.99) == []
    cut = prune(build_model("bert"), space.axes, least.shape)
    assert (cut.config.num_hidden_layers, cut.config.hidden_size) == (1, least.sizes.hidden)
    assert cut.bert.encoder.layer[0].intermediate.dense.out_features == least.sizes.ffn[0]


@pytest.mark.slow
def test_models_pruned_to_planned_sizes_have_those_sizes(space):
    model = build_model("bert")
    for sizes in plan_measurements(get_sizes(space.axes), step=8):
        assert get_sizes(find_axes(prune(model, space.axes, make_first_units_shape(space.axes, sizes)))) == sizes


def test_kept_layers_are_spread_evenly():
    assert [space_layers_evenly(n, 6) for n in (1, 2, 3, 6)] == [(0,), (0, 5), (0, 2, 5), (0, 1, 2, 3, 4, 5)]
