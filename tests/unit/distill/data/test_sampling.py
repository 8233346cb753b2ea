"""Samplers: which rows an epoch has, how often, and with which weights."""

from collections import Counter

import numpy as np
import pytest
import torch

from distill.data.batches.data_module import RowsDataModule
from distill.data.batches.encode import Encoded
from distill.data.batches.sampling import ClassBalanced, Curriculum, DistanceSampler, SyntheticShare, list_classes
from distill.data.batches.sampling_config import SamplingConfig
from distill.errors import InputError
from distill.train.steps.plain import weigh_gradients


def test_an_epoch_has_all_real_rows_and_synthetic_ones_have_their_turns():
    sampler = SyntheticShare(rows=20, first=5, last=17, per_epoch=4, seed=0)
    epochs = [sampler.draw(epoch).tolist() for epoch in range(6)]
    real = [0, 1, 2, 3, 4, 17, 18, 19]
    assert all(len(rows) == sampler.count == 12 and rows[:8] == real for rows in epochs)
    for start in (0, 3):
        assert sorted(row for rows in epochs[start : start + 3] for row in rows[8:]) == list(range(5, 17))
    assert epochs[0][8:] != epochs[3][8:], "the order of the second turn is another"


def test_classes_have_the_same_number_of_draws_and_rows_have_their_turns():
    classes = np.array([0] * 8 + [1] * 2 + [2] * 2)
    sampler = ClassBalanced(classes, seed=0)
    drawn = np.concatenate([sampler.draw(epoch) for epoch in range(2)])
    assert Counter(classes[drawn].tolist()) == {0: 8, 1: 8, 2: 8}
    assert Counter(drawn.tolist()) == {row: 1 if row < 8 else 4 for row in range(12)}
    assert sampler.find_weights(drawn) is None


@pytest.mark.parametrize("kind", ["balanced", "distance"])
def test_weights_make_up_for_frequencies(kind):
    values = np.arange(12.0)
    if kind == "balanced":
        sampler = ClassBalanced(np.array([0] * 8 + [1] * 2 + [2] * 2), 0, unbiased=True)
    else:
        sampler = DistanceSampler(12, lambda: np.linspace(0, 5, 12), 0, unbiased=True)
        sampler.begin_epoch(1)
    means = []
    for epoch in range(2000):
        rows = sampler.draw(epoch)
        means.append(float((values[rows] * sampler.find_weights(rows)).mean()))
    assert np.mean(means) == pytest.approx(values.mean(), rel=0.01)


def test_a_curriculum_grows_from_the_easiest_rows_to_all():
    sampler = Curriculum(np.array([5.0, 1, 4, 2, 3, 0, 6, 7, 9, 8]), epochs=3, start=0.2, seed=0)
    epochs = [sampler.draw(epoch) for epoch in range(3)]
    assert all(len(rows) == 10 for rows in epochs)
    assert Counter(epochs[0].tolist()) == {5: 5, 1: 5}
    assert sampler.find_share(1) == pytest.approx(np.sqrt(0.04 + 0.96 / 2))
    assert sorted(epochs[2].tolist()) == list(range(10))
    assert Curriculum(np.zeros(4), epochs=1, start=0.2, seed=0).find_share(0) == 1


def test_rows_are_drawn_in_proportion_to_their_distance():
    sampler = DistanceSampler(4, lambda: np.array([0.0, 0.0, 1.0, 3.0]), 0)
    sampler.begin_epoch(0)
    assert sorted(sampler.draw(0).tolist()) == [0, 1, 2, 3]
    sampler.begin_epoch(1)
    counts = Counter(np.concatenate([sampler.draw(epoch) for epoch in range(1000)]).tolist())
    expected = {0: 0.125, 1: 0.125, 2: 0.25, 3: 0.5}
    assert {row: counts[row] / 4000 for row in range(4)} == pytest.approx(expected, abs=0.02)


def make_data(measured: list[int]) -> RowsDataModule:
    rows = [np.arange(1, 4 + row % 3) for row in range(13)]
    data = RowsDataModule(
        Encoded(rows, None, np.zeros(13, np.int64), 0),
        Encoded(rows[:2], None, np.zeros(2, np.int64), 0),
        batch_size=4,
        threads=0,
    )

    def measure() -> np.ndarray:
        measured.append(len(measured))
        return np.arange(13.0) * (1 + len(measured))

    data.sampler = DistanceSampler(13, measure, 0, unbiased=True)
    return data


def test_training_that_resumes_within_an_epoch_draws_the_same_rows():
    whole, measured = [], []
    data = make_data(measured)
    batches = data.train_dataloader()
    for _ in range(2):
        whole += [*batches]
    assert len(batches) == 4
    assert measured == [0], "before the second epoch"
    data.teardown("fit")

    first = make_data([])
    batches, parts = first.train_dataloader(), []
    parts += [*batches]
    for batch in batches:
        parts.append(batch)
        if len(parts) == 6:
            break
    state = first.state_dict()
    again: list[int] = []
    second = make_data(again)
    second.load_state_dict(state)
    parts += [*second.train_dataloader()]
    assert again == [], "the student isn't compared again in the middle of an epoch"
    assert len(parts) == len(whole)
    for one, other in zip(whole, parts, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert "row_weights" in whole[5]


def test_weights_multiply_the_gradients_of_rows_and_not_their_values():
    rows = torch.randn(5, 3, requires_grad=True)
    weighed = weigh_gradients(rows, torch.tensor([2.0, 0.5]), [2, 3])
    assert torch.equal(weighed, rows)
    weighed.sum().backward()
    assert rows.grad[:, 0].tolist() == [2, 2, 0.5, 0.5, 0.5]


def test_rows_after_the_labelled_ones_have_no_class():
    assert list_classes([1, 0], 4).tolist() == [1, 0, -1, -1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"start": 0.0}, "sampling.start: expected a share above 0 and at most 1, found 0"),
        ({"unbiased": True}, "sampling.unbiased: expected sampling.by distance or balanced, found uniform"),
    ],
)
def test_settings_without_effect_are_rejected(settings, message):
    with pytest.raises(InputError, match=message):
        SamplingConfig(**settings)
