"""Synthetic rows of a split: how many, which, and where their tags and answers are."""

import pytest
import torch

from distill.data.augment.agreement import measure_tag_agreement, overlap_distributions
from distill.data.augment.config import AugmentConfig, parse_kinds
from distill.data.augment.kinds import Resources, build_kinds
from distill.data.augment.rows import build_part, find_name_types, make_rows, split_sources
from distill.data.augment.words import RowWord
from distill.data.rows.questions import Questions
from distill.data.rows.tagged import Tagged
from distill.data.sources.answer_cells import Answer
from distill.data.splits.examples import Examples
from distill.errors import InputError

TEXTS = ["where is my new card", "i lost my card in Rome", "how do i top up by transfer", "the app does not open"]
CHANGES = {"swap": 0.2, "delete": 0.2, "keyboard": 0.2}


def augment(part, rates=CHANGES, labels=("a", "b"), seed=0, times=5, known=(), is_labelled=True):
    rows = split_sources(part, labels)
    kinds = build_kinds(rates, [each for row in rows for each in row], Resources(types=find_name_types(labels)))
    changed_rows = list(make_rows(rows, kinds, times, seed, known))
    return changed_rows, build_part(part, changed_rows, labels, is_labelled=is_labelled)


def test_every_row_gets_different_synthetic_rows_with_its_label():
    part = Examples(TEXTS, labels=[0, 1, 0, 1])
    changed_rows, synthetic = augment(part)
    assert len(synthetic) == 20
    assert len({*synthetic.texts, *TEXTS}) == 24
    assert synthetic.labels == [part.labels[row.source] for row in changed_rows]
    assert augment(part)[1] == synthetic
    assert augment(part, seed=1)[1] != synthetic
    assert augment(part, is_labelled=False)[1].labels == []


def test_the_kind_of_each_row_is_drawn():
    kinds = {row.kind for row in augment(Examples(TEXTS), times=20)[0]}
    assert kinds == set(CHANGES)


def test_no_synthetic_row_equals_a_known_text():
    part = Examples(["one two"])
    assert [row.text for row in augment(part, {"swap": 1.0}, times=3)[0]] == ["two one"]
    assert augment(part, {"swap": 1.0}, known=["two  one"])[0] == []


def test_a_kind_with_nothing_to_change_is_replaced_by_another():
    changed_rows, _ = augment(Examples(["pay now please"]), {"numbers": 1.0, "delete": 0.1}, times=3)
    assert {row.kind for row in changed_rows} == {"delete"}


def test_both_texts_of_a_pair_are_changed():
    _, synthetic = augment(Examples(TEXTS, pairs=TEXTS[::-1]), {"swap": 0.2}, times=2)
    assert len(synthetic.pairs) == len(synthetic.texts)
    assert all(text not in TEXTS for text in [*synthetic.texts, *synthetic.pairs])


LABELS = ("B-LOC", "B-PER", "I-LOC", "I-PER", "O")


def test_tags_move_with_their_words():
    part = Tagged([["Ada", " Byron", " went", " to", " New", " York", " ."], ["Bob", " left", " Rome"]],
                  [[1, 3, 4, 4, 0, 2, 4], [1, 4, 0]])  # fmt: skip
    tag_of = {"Ada": 1, "Byron": 3, "New": 0, "York": 2, "Bob": 1, "Rome": 0}
    rates = {"swap": 0.5, "delete": 0.3, "crop": 0.4, "insert": 0.2, "names": 1.0}
    changed_rows, synthetic = augment(part, rates, LABELS, times=40)
    assert {row.kind for row in changed_rows} == set(rates)
    for row, words, tags in zip(changed_rows, synthetic.texts, synthetic.labels, strict=True):
        assert len(words) == len(tags)
        assert [word.startswith(" ") for word in words] == [False, *[True] * (len(words) - 1)]
        if row.kind != "insert":  # words that are put in are outside names
            assert [tag_of.get(word.strip(), 4) for word in words] == tags
        for before, tag in zip([4, *tags], tags, strict=False):
            assert not LABELS[tag].startswith("I-") or LABELS[before][2:] == LABELS[tag][2:]


def test_answers_move_with_their_words():
    context = "In 1999 Ada moved to New York. It was cold. She liked it."
    part = Questions(["where did she move to"], [context], [[Answer("New York", 21), Answer("York", 25)]])
    rates = {"sentences": 1.0, "crop": 0.3, "insert": 0.2, "keyboard": 0.3, "swap": 0.2}
    changed_rows, synthetic = augment(part, rates, (), times=60)
    assert len({row.kind for row in changed_rows}) == len(rates)
    for text, answers in zip(synthetic.pairs, synthetic.labels, strict=True):
        assert [text[each.start : each.start + len(each.text)] for each in answers] == ["New York", "York"]
    assert len({answers[0].start for answers in synthetic.labels}) > 5


def test_answers_move_from_a_context_that_begins_with_blanks_and_may_begin_with_one():
    context = "  The capital of France is Paris , they say ."
    answers = [Answer(" Paris", context.index(" Paris")), Answer("France", context.index("France"))]
    part = Questions(["what is it"], [context], [answers])
    _, synthetic = augment(part, {"delete": 0.5, "sentences": 1.0}, (), times=40)
    for text, moved in zip(synthetic.pairs, synthetic.labels, strict=True):
        assert [text[each.start : each.start + len(each.text)] for each in moved] == ["Paris", "France"]
        assert [each.text for each in moved] == ["Paris", "France"]


def test_the_overlap_is_one_minus_the_total_variation():
    first = torch.tensor([[0.0, 0.0], [9.0, -9.0]]).double()
    second = torch.tensor([[0.0, 0.0], [-9.0, 9.0]]).double()
    variation = (first.softmax(-1) - second.softmax(-1)).abs().sum(-1) / 2
    torch.testing.assert_close(overlap_distributions(first, second).double(), 1 - variation, atol=1e-6, rtol=0)


def test_the_agreement_of_tags_compares_each_word_with_its_origin():
    original = torch.tensor([[9.0, 0.0], [0.0, 9.0], [torch.nan, torch.nan]])
    words = [
        RowWord("b", origin=1, tag=0),
        RowWord("a", origin=0, tag=1),
        RowWord("c", origin=2),
        RowWord("new"),
        RowWord("d", tag=0),
    ]
    same = torch.tensor([[0.0, 9.0], [9.0, 0.0], [0.0, 0.0], [0.0, 0.0], [30.0, 0.0]])
    assert measure_tag_agreement(words, original, same, [0, 1, 2, 3, 4]) == pytest.approx(1.0)
    assert measure_tag_agreement(words, original, same.flip(-1), [0, 1, 2, 3, 4]) == pytest.approx(0.0, abs=1e-3)


def test_groups_and_shares_are_read():
    assert list(parse_kinds("noise,keyboard=off,swap=0.3")) == [
        "swap",
        "insert",
        "delete",
        "ocr",
        "case",
        "punctuation",
    ]
    assert parse_kinds("noise,swap=0.3")["swap"] == 0.3
    assert not AugmentConfig().requested


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kinds": "keybord"}, "expected kinds among rules, .*, found 'keybord'; did you mean 'keyboard'"),
        ({"kinds": "swap,swap"}, "kind 'swap' is given twice"),
        ({"kinds": "swap=2"}, "swap: expected a share of words above 0 and at most 1, found '2'"),
        ({"kinds": "ngrams=0.1"}, "ngrams: expected no value, found '0.1'"),
        ({"kinds": "noise=0.1"}, "noise: expected no value, found '0.1': give it to one of insert"),
        ({"kinds": "synonyms"}, "synonyms: expected a file in augment.lexicon, found none"),
        ({"kinds": "fillers"}, "fillers: expected a file in augment.templates, found none"),
        ({"kinds": "swap", "lexicon": "x"}, "augment.lexicon: expected synonyms in data.augment, found swap"),
        ({"kinds": "swap", "times": 0}, "augment.times: expected at least 1, found 0"),
        ({"kinds": "swap", "ratio": 11}, "augment.ratio: expected 0 to augment.times 10, found 11"),
        ({"kinds": "swap", "agreement": 1}, "augment.agreement: expected at least 0 and less than 1, found 1"),
    ],
)
def test_settings_that_cannot_be_met_are_rejected(settings, message):
    with pytest.raises(InputError, match=message):
        AugmentConfig(**settings)
