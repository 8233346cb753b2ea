"""Tests of spelling: what counts as known, which candidate is chosen, and what is never changed."""

import pytest

from distill.data.clean.spelling import Dictionary, Speller, find_candidates, read_english_words

TEXTS = [
    *["my card has not arrived"] * 40,
    *["the transfer was declined again"] * 30,
    *["send it to the bank please"] * 20,
    *["pay with paypal today"] * 6,
]
ENGLISH = ("my", "card", "cart", "has", "not", "arrived", "the", "transfer", "was", "declined", "send", "bank", "bang")


def build(*texts: str, listed=ENGLISH, edits: int = 1) -> Speller:
    return Speller.build(Dictionary.build([*TEXTS, *texts], listed), edits)


def correct(text: str, **settings) -> str:
    return build(text, **settings).correct(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("my cadr has arived", "my card has arrived"),  # swapped and dropped letters
        ("My Carrd has not arrived", "My Card has not arrived"),
        ("THE TRANSFRE WAS DECLINED", "THE TRANSFER WAS DECLINED"),
        ("my banc send", "my banc send"),  # bank or bang: neither stands between these neighbors
        ("to the banl please", "to the bank please"),
        ("my cart has not arrived", "my cart has not arrived"),  # a word, though rare
        ("pay with paypal todya", "pay with paypal today"),  # frequent in the data, though not listed
        ("the card2 and v1.2 and x@decline.org and #decline", "the card2 and v1.2 and x@decline.org and #decline"),
        ("wq xz", "wq xz"),  # nothing is near
        ("the bank's card", "the bank's card"),  # a form of a listed word
    ],
)
def test_only_unknown_words_with_one_likely_correction_change(text, expected):
    assert correct(text) == expected


def test_a_frequent_typo_of_a_far_more_frequent_word_is_unknown():
    often = ["my crad has not arrived"] * 5
    candidates = find_candidates(Dictionary.build([*TEXTS * 2, *often], ENGLISH))
    assert candidates["crad"] == ["card"]
    assert find_candidates(Dictionary.build([*often * 9, *["my card"] * 9], ("my",))) == {}


def test_short_words_need_neighbors_that_support_the_correction():
    assert correct("send it to the bnk please") == "send it to the bank please"
    assert correct("bnk") == "bnk"


def test_more_edits_are_allowed_on_request():
    assert correct("the trasnfre was declined") == "the trasnfre was declined"
    assert correct("the trasnfre was declined", edits=2) == "the transfer was declined"


def test_curly_apostrophes_are_those_of_the_dictionary():
    texts = ["it hasn't arrived"] * 20
    speller = Speller.build(Dictionary.build([*texts, "it hasnt arrived", "it hasn’t arrived"], ("it", "arrived")))
    assert speller.correct("it hasnt arrived, it hasn’t") == "it hasn't arrived, it hasn’t"


def test_the_list_has_few_rare_words_of_few_letters():
    words = read_english_words()
    assert {"card", "from", "transfer", "supersede"} <= words
    assert words.isdisjoint(("comr", "hae"))
    assert len(words) > 50_000
