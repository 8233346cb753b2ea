"""Scores of difficulty, choices that cover the rows, and the settings of both."""

import numpy as np
import pytest
import torch

from distill.data.select.config import SelectConfig
from distill.data.select.coverage import (
    choose_balanced,
    choose_by_difficulty,
    choose_centres,
    choose_facilities,
    choose_mixture,
    choose_similar,
    choose_strata,
    keep_classes,
    measure_typicality,
)
from distill.data.select.scores import area_under_margin, compute_label_loss, el2n, entropy, forgetting, margin
from distill.errors import InputError
from distill.losses.config import LossConfig
from distill.losses.kept_share import scale_ce_by_kept_share

GENERATOR = torch.Generator().manual_seed(0)
LOGITS = torch.randn(6, 20, 4, generator=GENERATOR)  # epochs, rows, classes
LABELS = torch.arange(20) % 4


def test_scores_of_logits_equal_their_definitions():
    logits, p = LOGITS[0], LOGITS[0].double().softmax(-1)
    torch.testing.assert_close(entropy(logits).double(), -(p * p.log()).sum(-1), atol=1e-6, rtol=0)
    best = p.sort(descending=True).values
    torch.testing.assert_close(margin(logits).double(), 1 - best[:, 0] + best[:, 1], atol=1e-6, rtol=0)
    label_probabilities = p[torch.arange(20), LABELS]
    torch.testing.assert_close(
        compute_label_loss(logits, LABELS).double(), -label_probabilities.log(), atol=1e-6, rtol=0
    )
    assert entropy(torch.tensor([[0.0, -torch.inf]])).item() == 0


def test_el2n_is_the_error_after_the_first_fifth_of_the_epochs():
    p = LOGITS[0].double().softmax(-1)
    expected = (p - torch.nn.functional.one_hot(LABELS, 4)).norm(dim=-1)
    torch.testing.assert_close(el2n(LOGITS, LABELS).double(), expected, atol=1e-6, rtol=0)
    assert not torch.equal(el2n(LOGITS.repeat(2, 1, 1), LABELS), el2n(LOGITS.flip(0), LABELS))


def test_forgetting_counts_the_times_that_a_right_answer_is_lost():
    right, wrong = torch.tensor([5.0, 0.0]), torch.tensor([0.0, 5.0])
    rows = [[right] * 4, [right, wrong, right, wrong], [wrong, wrong, right, right], [wrong] * 4]
    logits = torch.stack([torch.stack(row) for row in rows], 1)
    scores = forgetting(logits, torch.zeros(4, dtype=torch.long))
    assert scores.floor().tolist() == [0, 2, 0, 4]
    assert scores[2] > scores[0], "of equal rows the one with the larger loss is harder"


def test_the_area_under_the_margin_is_negative_for_wrong_labels():
    logits = torch.tensor([[[3.0, 1.0, 0.0], [3.0, 1.0, 0.0]], [[5.0, 0.0, 1.0], [5.0, 0.0, 1.0]]])
    assert area_under_margin(logits, torch.tensor([0, 1])).tolist() == [-3.0, 3.5]


def test_difficult_or_easy_rows_are_chosen():
    scores = np.array([0.3, 0.9, 0.1, 0.5])
    assert choose_by_difficulty(scores, 2).tolist() == [1, 3]
    assert choose_by_difficulty(scores, 2, hard=False).tolist() == [2, 0]


def clusters() -> torch.Tensor:
    """Returns 90 vectors in three directions, of 60, 20 and 10 rows."""
    centres = torch.eye(8)[:3].repeat_interleave(torch.tensor([60, 20, 10]), 0)
    return centres + 0.05 * torch.randn(90, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("choose", [choose_centres, choose_facilities])
def test_chosen_rows_cover_every_cluster_and_differ(choose):
    chosen = choose(clusters(), 6, 0)
    assert len(set(chosen.tolist())) == 6
    assert {0 if row < 60 else 1 if row < 80 else 2 for row in chosen.tolist()[:3]} == {0, 1, 2}
    assert chosen.tolist() == choose(clusters(), 6, 0).tolist()


def test_each_centre_is_the_farthest_from_those_before_it():
    vectors = torch.nn.functional.normalize(clusters(), dim=-1)
    chosen = choose_centres(clusters(), 5, 0).tolist()
    for index in range(1, 5):
        nearest = (vectors @ vectors[chosen[:index]].T).max(-1).values
        nearest[chosen[:index]] = 2
        assert chosen[index] == int(nearest.argmin())


def test_facilities_cover_more_than_random_rows():
    vectors = torch.randn(300, 16, generator=torch.Generator().manual_seed(2))
    unit = torch.nn.functional.normalize(vectors, dim=-1)

    def cover(rows) -> float:
        return float((unit @ unit[torch.as_tensor(rows)].T).max(-1).values.mean())

    others = [cover(np.random.default_rng(seed).permutation(300)[:20]) for seed in range(20)]
    assert cover(choose_facilities(vectors, 20, 0)) > max(others)


def test_a_mixture_is_typical_or_diverse_by_its_weight():
    typical, diverse = (set(choose_mixture(clusters(), 8, weight).tolist()) for weight in (0.99, 0.01))
    assert all(row < 60 for row in typical)
    assert {0 if row < 60 else 1 if row < 80 else 2 for row in diverse} == {0, 1, 2}


def test_typical_rows_are_not_those_between_the_classes():
    """The mean of all rows lies between two classes, where a teacher is least sure of its answer."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.eye(2, 16)
    sides = [centre + 0.1 * torch.randn(50, 16, generator=generator) for centre in centres]
    between = centres.sum(0) / 2**0.5 + 0.3 * torch.randn(10, 16, generator=generator)
    vectors = torch.cat([*sides, between])
    chosen = choose_mixture(vectors, 10, 0.9)
    assert {0 if row < 50 else 1 if row < 100 else 2 for row in chosen.tolist()} == {0, 1}
    typical = measure_typicality(torch.nn.functional.normalize(vectors, dim=-1))
    assert typical[100:].max() < typical[:100].median()


def test_rows_near_a_target_are_chosen():
    assert set(choose_similar(clusters(), clusters()[80:82], 10).tolist()) == set(range(80, 90))


def test_strata_have_the_same_number_of_rows_without_the_hardest():
    scores = np.concatenate([np.linspace(0, 1, 900), np.linspace(1, 10, 100)])
    chosen = choose_strata(scores, 100, 0.05, 0)
    assert len(set(chosen.tolist())) == 100
    assert scores[chosen].max() <= np.sort(scores)[949]
    hard = (scores[chosen] > 1).mean()
    assert hard > 0.3, "of a random choice it would be 5 %"
    assert len(choose_strata(np.zeros(50), 20, 0.1, 0)) == 20


def test_classes_are_balanced_as_far_as_they_have_rows():
    classes = np.array([0] * 50 + [1] * 20 + [2] * 3)
    chosen = choose_balanced(classes, 23, 0)
    assert np.bincount(classes[chosen]).tolist() == [10, 10, 3]
    assert len(set(chosen.tolist())) == 23


def test_a_class_without_rows_gets_one_in_place_of_the_largest_classs_last():
    classes = np.array([0, 0, 0, 1, 1, 2])
    chosen = keep_classes(np.array([0, 3, 1, 2]), classes, 0)
    assert chosen.tolist() == [0, 3, 1, 5]


def test_the_teacher_counts_more_the_fewer_rows_there_are():
    loss = scale_ce_by_kept_share(LossConfig(kl=0.5, ce=0.5), 0.2)
    assert (loss.kl, loss.ce) == (0.9, 0.1)
    assert scale_ce_by_kept_share(LossConfig(kl=1, ce=0), 0.2) == LossConfig(kl=1, ce=0)


@pytest.mark.parametrize("ramps", [{"ce": (0, 1)}, {"kl": (2, 1)}, {"ce": (1, 0.5), "kl": (0, 1)}])
def test_the_share_of_the_rows_is_followed_by_ramps_too(ramps):
    loss = LossConfig(kl=1, ce=0.5, ramps=ramps)
    followed = scale_ce_by_kept_share(loss, 0.2)
    for progress in (0.0, 0.3, 1.0):
        before, after = loss.interpolate_ramps(progress), followed.interpolate_ramps(progress)
        assert after.ce == pytest.approx(0.2 * before.ce)
        assert after.kl == pytest.approx(before.kl + 0.8 * before.ce)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"share": 0.5}, "expected a method with select.share"),
        ({"method": "random"}, "expected either select.share above 0 and below 1 or select.rows, found share 0 and"),
        ({"method": "random", "share": 0.5, "rows": 3}, "found share 0.5 and rows 3"),
        ({"method": "random", "share": 1.0}, "found share 1 and rows 0"),
        ({"method": "aum", "share": 0.5, "source": "unlabelled"}, "expected select.source train, found unlabelled"),
        ({"method": "ccs", "score": "loss", "share": 0.5, "source": "all"}, "expected select.source train, found all"),
        ({"method": "similarity", "share": 0.5}, "expected select.target with similarity and only with it, found none"),
        ({"method": "ccs", "share": 0.5, "cutoff": 1.0}, "select.cutoff: expected at least 0 and less than 1, found 1"),
    ],
)
def test_settings_that_cannot_be_met_are_rejected(settings, message):
    with pytest.raises(InputError, match=message):
        SelectConfig(**settings)
    with pytest.raises(InputError, match="expected to keep at least 1 and fewer than 10 rows of train, found 10"):
        SelectConfig(method="random", rows=10).count_kept(10)
