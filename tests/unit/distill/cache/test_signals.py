"""Tests sampled and top-k signals: they round-trip and approximate the teacher's distribution."""

import numpy as np
import pytest
import torch

from distill.cache.signals import Dense, Sampled, TeacherOutputs, TopK
from distill.cache.signals.comb import sample_with_comb
from distill.cache.signals.sampled import draw_offsets, systematic_sample
from distill.errors import InputError
from support.signalling import LENGTHS, key_of, make_outputs, positions_of_rows, round_trip, seeded


def logits_of(width: int, lengths: list[int] = LENGTHS, spread: float = 3.0, seed: int = 0) -> torch.Tensor:
    return spread * torch.randn(len(lengths), max(lengths), width, generator=seeded(seed))


def dense_of(signals: dict, width: int) -> torch.Tensor:
    """Returns sampled weights as a dense tensor [positions, vocabulary]."""
    return torch.zeros(len(signals["ids"]), width).scatter_add(1, signals["ids"], signals["weights"])


def draw(logits: torch.Tensor, offsets: np.ndarray, draws: int) -> torch.Tensor:
    """Returns the counts [positions, vocabulary] of `sample_with_comb`."""
    ids, counts, sizes = sample_with_comb(logits.numpy(), offsets, draws, 1.0, 1)
    out = torch.zeros(logits.shape, dtype=torch.int64)
    out[torch.arange(len(logits)).repeat_interleave(torch.from_numpy(sizes).long()), ids] = torch.from_numpy(
        counts
    ).long()
    return out


# Sampled


@pytest.mark.parametrize("chosen", [None, [[0, 4], [], [6], [1, 2]]], ids=["all tokens", "masked ones"])
@pytest.mark.parametrize("draws", [1, 24, 300])
@pytest.mark.parametrize("width", [1, 63, 64, 257, 1000])
def test_a_sampled_distribution_round_trips_exactly(width, draws, chosen):
    signal, where = Sampled(width, draws=draws), positions_of_rows(LENGTHS, chosen)
    output = make_outputs("logits", logits_of(width), where)
    rows, restored = signal.rows(output), round_trip(signal, output)
    assert restored["ids"].dtype == torch.int64
    assert restored["weights"].dtype == torch.float32
    ids, counts, sizes = (np.concatenate(column) for column in zip(*rows, strict=True))
    assert len(sizes) == len(restored["ids"]) == int(where.positions.sum())
    assert restored["ids"].shape[1] == sizes.max()
    used = restored["weights"] > 0
    assert np.array_equal(used.sum(1), sizes)
    assert np.array_equal(restored["ids"][used], ids)
    assert np.array_equal(restored["weights"][used], counts.astype(np.float32) / np.float32(draws))
    assert not restored["ids"][~used].any()
    torch.testing.assert_close(restored["weights"].sum(1), torch.ones(len(used)))


@pytest.mark.parametrize("width", [3, 64, 100, 256, 300, 1 << 17])
def test_each_count_is_the_expected_count_rounded_up_or_down(width):
    draws, logits = 40, logits_of(width, [20])[0]
    counts = draw(logits, np.random.default_rng(1).random(20), draws)
    expected = draws * logits.double().softmax(-1)
    assert (counts.sum(1) == draws).all()
    # 1e-4: masses are float32, so an expected count that is a whole number may be rounded to either side
    assert (counts >= (expected - 1e-4).floor()).all()
    assert (counts <= (expected + 1e-4).ceil()).all()


def test_the_mean_of_many_draws_is_the_teachers_distribution():
    """A count is floor + Bernoulli(f) with variance f (1 - f), so the mean of n draws is within 5 deviations of p."""
    width, draws, n = 300, 8, 4000
    logits = logits_of(width, [2])[0, :1]
    offsets = np.concatenate([draw_offsets(key_of(7), 1, seed) for seed in range(n)])
    mean = draw(logits.expand(n, -1).contiguous(), offsets, draws).double().mean(0)
    expected = draws * logits[0].double().softmax(-1)
    rest = expected % 1
    assert ((mean - expected).abs() <= 5 * (rest * (1 - rest) / n).sqrt() + 5e-4).all()


def test_offsets_are_uniform_and_differ_between_positions():
    offsets = draw_offsets(key_of(3), 100_000, 0)
    assert (offsets >= 0).all()
    assert (offsets < 1).all()
    assert len(np.unique(offsets)) == len(offsets)
    # 5 standard errors of the mean of 100,000 uniform numbers, whose variance is 1 / 12
    assert abs(offsets.mean() - 0.5) < 5 * (1 / 12 / 1e5) ** 0.5
    assert abs(np.corrcoef(offsets[1:], offsets[:-1])[0, 1]) < 5 / 1e5**0.5
    histogram = np.histogram(offsets, 100, (0, 1))[0]
    assert ((histogram - 1000) ** 2 / 1000).sum() < 99 + 5 * (2 * 99) ** 0.5


def test_forbidden_ids_are_never_drawn():
    logits = torch.full((500, 700), -torch.inf)
    allowed = torch.tensor([5, 300, 699])
    logits[:, allowed] = torch.randn(500, 3, generator=seeded(1))
    counts = draw(logits, np.random.default_rng(2).random(500), 6)
    assert counts[:, allowed].sum() == 500 * 6
    ids = systematic_sample(logits, torch.rand(500, generator=seeded(2), dtype=torch.float64), 6)[0]
    assert set(ids.tolist()) <= set(allowed.tolist())


@pytest.mark.parametrize("offset", [0.0, 1 - 2.0**-53])
def test_extreme_offsets_draw_only_ids_that_have_mass(offset):
    logits = torch.full((1, 1000), -torch.inf)
    logits[0, [300, 400, 600]] = torch.tensor([0.0, 5.0, 0.0])
    for draws in (1, 2, 7, 100):
        counts = draw(logits, np.array([offset]), draws)
        assert counts[0, [300, 400, 600]].sum() == draws


def test_peaked_and_uniform_distributions_are_sampled_correctly():
    logits = torch.zeros(2, 1000)
    logits[0, 123] = 1e4
    counts = draw(logits, np.array([0.3, 0.3]), 24)
    assert counts[0, 123] == 24
    assert (counts[1] > 0).sum() == 24
    assert (counts[1].nonzero()[:, 0].diff().float() - 1000 / 24).abs().max() <= 1


@pytest.mark.parametrize("width", [1, 63, 65, 500, 1 << 14])
@pytest.mark.parametrize("spread", [0.0, 2.0, 30.0])
def test_both_implementations_agree_except_for_rare_ties(width, spread):
    logits = logits_of(width, [400 if width < 1000 else 60], spread)[0]
    offsets = np.random.default_rng(4).random(len(logits))
    ids, counts, sizes = systematic_sample(logits, torch.from_numpy(offsets), 24)
    other = torch.zeros(logits.shape, dtype=torch.int64)
    owner = torch.arange(len(logits)).repeat_interleave(torch.from_numpy(sizes).long())
    other[owner, ids] = torch.from_numpy(counts).long()
    moved = (draw(logits, offsets, 24) != other).sum(1)
    assert moved.max() <= 4
    assert (moved > 0).double().mean() <= 0.05


def test_the_sampling_temperature_divides_the_logits():
    logits = logits_of(200, [30])[0]
    offsets = np.random.default_rng(5).random(30)
    warm = sample_with_comb(logits.numpy(), offsets, 24, 2.5, 1)
    plain = sample_with_comb((logits / 2.5).numpy(), offsets, 24, 1.0, 1)
    assert (warm[2] != plain[2]).mean() <= 0.1
    assert len(np.intersect1d(warm[0], plain[0])) > 100
    flat = draw(logits, offsets, 24)
    assert warm[2].mean() > (flat > 0).sum(1).double().mean() + 3


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_draws_are_independent_of_the_batch_and_the_thread_count(threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    signal, logits = Sampled(777), logits_of(777)
    together = signal.rows(make_outputs("logits", logits, positions_of_rows(LENGTHS)))
    for i, length in enumerate(LENGTHS):
        alone = signal.rows(
            TeacherOutputs({"logits": logits[i : i + 1, :length]}, positions_of_rows([length]), [key_of(i)])
        )[0]
        assert all(np.array_equal(a, b) for a, b in zip(together[i], alone, strict=True))


def test_different_seeds_and_samples_give_different_draws():
    output = make_outputs("logits", logits_of(777)[:1].expand(4, -1, -1), positions_of_rows([7, 7, 7, 7]))
    first, other = (dense_of(round_trip(Sampled(777, seed=seed), output), 777) for seed in (0, 1))
    assert not torch.equal(first, other)
    assert not torch.equal(first[:7], first[7:14])


def test_samples_from_16_million_ids_round_trip():
    width = 1 << 24
    logits = torch.full((1, 2, width), -3.0)
    logits[0, 0, [0, 77, width - 1]] = torch.tensor([14.0, 14.5, 15.0])
    signal, output = Sampled(width, draws=24), make_outputs("logits", logits, positions_of_rows([2]))
    rows, restored = signal.rows(output), round_trip(signal, output)
    assert np.array_equal(restored["ids"][restored["weights"] > 0], rows[0][0])
    assert {0, 77, width - 1} <= set(restored["ids"][0].tolist())
    assert restored["ids"][1].diff().sub(width / 24).abs().max() <= width / 24 * 1e-3


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("index", [0, 255, 256, 299])
@pytest.mark.parametrize("signal", [Sampled(300), TopK(300, k=8), Dense(300, each="position")], ids=lambda s: s.kind)
def test_logits_that_are_not_finite_are_rejected_with_their_position(signal, index, bad):
    logits = logits_of(300)
    logits[2, 1, index] = bad
    with pytest.raises(InputError, match="position 7 of a batch of 16"):
        signal.rows(make_outputs("logits", logits, positions_of_rows(LENGTHS)))
    logits[2, 1] = -torch.inf
    with pytest.raises(InputError, match="expected finite logits"):
        signal.rows(make_outputs("logits", logits, positions_of_rows(LENGTHS)))


def test_nan_in_the_padding_is_accepted():
    logits = logits_of(300)
    logits[1, 3] = torch.nan
    for signal in (Sampled(300), TopK(300, k=8), Dense(300, each="position")):
        assert len(signal.rows(make_outputs("logits", logits, positions_of_rows(LENGTHS)))) == 4


@pytest.mark.parametrize("signal", [Sampled(300), TopK(300), Dense(300)], ids=lambda s: s.kind)
def test_logits_of_another_width_are_rejected(signal):
    logits = logits_of(299)
    with pytest.raises(InputError, match="300, found 299"):
        signal.rows(
            make_outputs("logits", logits[:, 0] if signal.kind == "dense" else logits, positions_of_rows(LENGTHS))
        )


# TopK


@pytest.mark.parametrize("step", [0.03, 0.125, 0.5])
@pytest.mark.parametrize("width", [1, 7, 100])
def test_top_k_of_all_ids_keeps_the_distribution_to_one_grid_step(width, step):
    logits = logits_of(width, spread=1.5)
    restored = round_trip(TopK(width, k=width, step=step), make_outputs("logits", logits, positions_of_rows(LENGTHS)))
    exact = logits[positions_of_rows(LENGTHS).tokens].log_softmax(-1)
    error = restored["log_probs"] - exact
    assert torch.equal(restored["ids"], torch.arange(width).expand(len(exact), -1))
    # each id is off by at most half a step, and a whole position by a common factor of at most as much
    assert (error - (error.amax(1) + error.amin(1))[:, None] / 2).abs().max() <= step / 2 + 1e-4
    assert error.abs().max() <= step + 1e-4
    assert restored["tail"].max() < 1e-5


@pytest.mark.parametrize(("width", "k"), [(10, 1), (100, 7), (2000, 64), (1 << 17, 64)])
@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0, 50.0])
def test_the_likeliest_ids_and_the_tail_are_stored_to_one_grid_step(width, k, spread):
    where, signal = positions_of_rows([3, 2]), TopK(width, k=k)
    logits = logits_of(width, [3, 2], spread)
    restored = round_trip(signal, make_outputs("logits", logits, where))
    exact = logits[where.tokens].double().log_softmax(-1)
    top = exact.topk(k)
    assert torch.equal(exact.gather(1, restored["ids"]).sort(descending=True).values, top.values)
    assert (restored["ids"].diff() > 0).all()
    torch.testing.assert_close(restored["log_probs"].exp().sum(1) + restored["tail"], torch.ones(5))
    likely = exact.gather(1, restored["ids"]) > -100
    assert (restored["log_probs"] - exact.gather(1, restored["ids"]))[likely].abs().max() <= signal.step + 1e-4
    tail = 1 - top.values.exp().sum(1)
    assert (restored["tail"] - tail).abs().le(tail * (np.exp(signal.step) - 1) + 1e-6).all()


def test_a_one_hot_distribution_has_no_tail():
    logits = torch.full((1, 1, 500), -torch.inf)
    logits[..., 42] = 3.0
    restored = round_trip(TopK(500, k=4), make_outputs("logits", logits, positions_of_rows([1])))
    chosen = restored["ids"][0] == 42
    assert restored["log_probs"][0, chosen] == 0
    assert (restored["log_probs"][0, ~chosen] < -100).all()
    assert restored["tail"] == 0
    assert not restored["log_probs"].isnan().any()


def test_the_top_k_temperature_divides_the_logits():
    where, logits = positions_of_rows(LENGTHS), logits_of(100)
    warm = round_trip(TopK(100, k=9, temperature=2.0), make_outputs("logits", logits, where))
    plain = round_trip(TopK(100, k=9), make_outputs("logits", logits / 2, where))
    assert all(torch.equal(warm[name], plain[name]) for name in ("ids", "log_probs", "tail"))
