"""Tests of near duplicates against the similarity of all pairs."""

import numpy as np
import pytest

from distill.data.clean.near_duplicates import SHINGLE, find_near_duplicates, find_similar, pair_equal_keys
from distill.data.sources.text_column import TextColumn
from distill.data.splits.overlap import normalize_text

WORDS = np.array(["my", "card", "has", "not", "arrived", "yet", "tell", "me", "how", "long", "transfers", "why"])


def draw_texts(count: int, seed: int) -> list[str]:
    """Random sentences, of which every third nearly equals an earlier one."""
    rng = np.random.default_rng(seed)
    texts: list[str] = []
    for number in range(count):
        if number % 3 or not texts:
            texts.append(" ".join(rng.choice(WORDS, rng.integers(6, 20))))
        else:
            words = texts[int(rng.integers(len(texts)))].split()
            words[int(rng.integers(len(words)))] = str(rng.choice(WORDS))
            texts.append(" ".join(words).upper())
    return texts


def shingles(text: str) -> set[str]:
    plain = normalize_text(text)
    return {plain[i : i + SHINGLE] for i in range(max(1, len(plain) - SHINGLE + 1))}


def similarity(one: str, two: str) -> float:
    return len(shingles(one) & shingles(two)) / len(shingles(one) | shingles(two))


@pytest.mark.parametrize(
    ("one", "two", "equal"),
    [
        ("Why a charge?", "why a charge", True),
        ("top-up", "top up!", True),
        ("a charge of €1", "a charge of £1", False),
        ("thanks 😀", "thanks 😡", False),
        ("2 + 2", "2 × 2", False),
        ("?", "!", False),
    ],
)
def test_texts_are_compared_without_case_and_punctuation_but_with_symbols(one, two, equal):
    assert (normalize_text(one) == normalize_text(two)) is equal


@pytest.mark.parametrize("least", [*(pytest.param(each, marks=pytest.mark.slow) for each in (0.6, 0.8)), 1.0])
@pytest.mark.parametrize("build", [pytest.param(list, marks=pytest.mark.slow), TextColumn.build])
def test_a_text_stays_unless_it_nearly_equals_an_earlier_one_that_stays(least, build):
    texts = draw_texts(400, 1)
    kept_rows: list[int] = []
    expected = []
    for row, text in enumerate(texts):
        similar = [other for other in kept_rows if similarity(text, texts[other]) >= least]
        expected.append(similar[0] if similar else -1)
        kept_rows += [] if similar else [row]
    found = find_near_duplicates(build(texts), least)
    missed = sum(one != two for one, two in zip(found.tolist(), expected, strict=True))
    assert sum(each >= 0 for each in expected) > 50 or least == 1.0
    assert missed <= (20 if least == 0.6 else 2), "at 0.6 a pair in 16 has no equal band"
    for row in np.flatnonzero(found >= 0).tolist():
        assert similarity(texts[row], texts[found[row]]) >= least


def test_texts_are_compared_with_references_only():
    texts = ["How long does a transfer take?", "how long does a TRANSFER take", "something else entirely here"]
    references = ["unrelated words of a reference", "How long does a transfer take"]
    assert find_similar(texts, references, 0.8).tolist() == [1, 1, -1]
    assert find_similar(texts, [], 0.8).tolist() == [-1, -1, -1]
    assert find_similar([], references, 0.8).tolist() == []


def test_short_empty_and_foreign_texts_are_compared_too():
    texts = ["", "ok", "OK!", "да, конечно", "Да конечно", "日本語のテキスト", "日本語のテキスト。"]
    assert find_near_duplicates(texts, 0.9).tolist() == [-1, -1, 1, -1, 3, -1, 5]
    assert find_near_duplicates([], 0.9).tolist() == []


def test_equal_keys_are_paired_with_the_first_and_the_one_before():
    pairs = pair_equal_keys(np.array([7, 5, 7, 5, 7], np.uint32))
    assert sorted(map(tuple, pairs.tolist())) == [(0, 2), (0, 2), (0, 4), (1, 3), (1, 3), (2, 4)]
    assert pair_equal_keys(np.array([1, 2], np.uint32)).shape == (0, 2)
