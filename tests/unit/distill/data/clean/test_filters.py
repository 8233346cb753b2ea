"""Tests of the filters of rows by language, length and symbols."""

import pytest

from distill.data.clean.filters import build_language_filter, build_length_filter, build_symbol_filter
from distill.errors import InputError

ENGLISH = ["My card has not arrived yet, what should I do?", "How long does a transfer to another bank take?"]
GERMAN = "Meine Karte ist noch nicht angekommen, was soll ich jetzt tun?"


def test_rows_in_another_language_than_most_are_dropped():
    judge = build_language_filter([*ENGLISH, GERMAN])
    assert [judge(text) for text in (*ENGLISH, GERMAN)] == ["", "", "language de, not en"]
    assert judge("ok") == "", "too little text to be sure"


def test_the_language_can_be_set():
    judge = build_language_filter(ENGLISH, "de")
    assert judge(GERMAN) == ""
    assert judge(ENGLISH[0]) == "language en, not de"
    with pytest.raises(InputError, match=r"step language: expected one of .*, found 'xx'"):
        build_language_filter(ENGLISH, "xx")


def test_rows_are_dropped_by_their_number_of_words():
    judge = build_length_filter("2:3")
    assert [judge(text) for text in ("one", "one two", "one two three", "a b c d")] == ["1 words", "", "", "4 words"]


def test_rows_of_symbols_are_dropped():
    judge = build_symbol_filter("0.5")
    assert judge("what is this?") == ""
    assert judge("#### 12 %%") == "80% symbols"
