"""Tests of the filters of rows by language, length and symbols."""

import pytest

from distill.data.clean.filters import build_language_filter, build_length_filter, build_symbol_filter
from distill.errors import InputError

ENGLISH = ["My card has not arrived yet, what should I do?", "How long does a transfer to another bank take?"]
GERMAN = "Meine Karte ist noch nicht angekommen, was soll ich jetzt tun?"


def test_rows_in_another_language_than_most_are_dropped():
    language_filter = build_language_filter([*ENGLISH, GERMAN])
    assert [language_filter(text) for text in (*ENGLISH, GERMAN)] == ["", "", "language de, not en"]
    assert language_filter("ok") == "", "too little text to be sure"


def test_the_language_can_be_set():
    language_filter = build_language_filter(ENGLISH, "de")
    assert language_filter(GERMAN) == ""
    assert language_filter(ENGLISH[0]) == "language en, not de"
    with pytest.raises(InputError, match=r"step language: expected one of .*, found 'xx'"):
        build_language_filter(ENGLISH, "xx")


def test_rows_are_dropped_by_their_number_of_words():
    length_filter = build_length_filter("2:3")
    assert [length_filter(text) for text in ("one", "one two", "one two three", "a b c d")] == [
        "1 words",
        "",
        "",
        "4 words",
    ]


def test_rows_of_symbols_are_dropped():
    symbol_filter = build_symbol_filter("0.5")
    assert symbol_filter("what is this?") == ""
    assert symbol_filter("#### 12 %%") == "80% symbols"
