"""Tests of the steps that change texts: what each changes, and what it leaves alone."""

import pyarrow as pa
import pytest

from distill.data.clean.config import TEXT_STEPS, parse_steps
from distill.data.clean.identifiers import has_valid_card_digit, has_valid_iban_digits
from distill.data.clean.text_steps import (
    CLEANED_AT_ONCE,
    PREPARED_STEPS,
    build_text_step,
    build_text_steps,
    clean_column,
)
from distill.data.sources.stored_texts import StoredTexts
from distill.data.sources.text_column import TextColumn

CASES = {
    "encoding": [
        ("The cafÃ© doesnâ€™t open", "The café doesn’t open"),
        ("“curly” quotes – and ﬁ ½ ℃", None),
        ("color \x1b[31mred\x1b[0m and \x07bell", "color red and bell"),
    ],
    "html": [
        ("<p>Tom &amp; Jerry</p><br/>say <b>hi</b>", " Tom & Jerry  say hi"),
        ("<script>alert(1)</script>text<!-- note -->", " text "),
        ("if a < b and c > d & e", None),
        ("AT&T; a <made> tag", None),
    ],
    "markdown": [
        ("# Title\nSee [the docs](https://x.org/a) and **this** `code`", "Title\nSee the docs and this code"),
        ("> quoted\n```python\nx = 1\n```", "quoted\n\nx = 1\n"),
        ("snake_case_name and 2 * 3 * 4 and a*b*c", None),
    ],
    "unicode": [("cafe\u0301", "café"), ("ﬁne", None)],
    "unicode=nfkc": [("ﬁne ½", "fine 1⁄2")],
    "urls": [
        ("see https://x.org/a?b=1, or www.y.com.", "see <url>, or <url>."),
        ("the www is wide", None),
    ],
    "urls=drop": [("see https://x.org now", "see  now")],
    "emails": [("write to a.b+c@mail.example.org.", "write to <email>."), ("at 3@4", None)],
    "users": [("ask @some_one or bob@x.org", "ask <user> or bob@x.org"), ("Sunday @11:22PM", None)],
    "numbers": [("pay 1,200.50 on 3/4 for 2nd try", "pay <number> on <number> for 2nd try"), ("covid19", None)],
    "personal": [
        ("IBAN DE89 3704 0044 0532 0130 00 ok", "IBAN <account> ok"),
        ("card 4111 1111 1111 1111.", "card <card>."),
        ("call +44 20 7946 0958 or (030) 1234-5678", "call <phone> or <phone>"),
        ("at 192.168.0.1 today", "at <address> today"),
        ("order 4111 1111 1111 1112 from 2024 to 2025, 100 times, 3.14159265", None),
    ],
    "personal=drop": [("call +44 20 7946 0958!", "call !")],
    "case": [("ÄPFEL and Pears", "äpfel and pears")],
    "elongations": [("sooo haaappy", "soo haappy"), ("www AAAA zzz T5-TTT2 happy", None)],
    "elongations=1": [("sooo", "so")],
    "whitespace": [
        ("a\tb\u00a0c   d\n e\u200b ", "a b c d e"),
        ("One.  Two.", None),
        ("One.\x1cTwo.", "One. Two."),
    ],
    "whitespace=lines": [("a \tb\n\n\n\n c  ", "a b\n\nc")],
}


@pytest.mark.parametrize("step", CASES)
def test_a_step_changes_what_it_should_and_nothing_else(step):
    (parsed,) = parse_steps(step)
    change = build_text_step(parsed).change
    for before, after in CASES[step]:
        assert change(before) == (before if after is None else after)
        assert change(change(before)) == change(before), "a second time it changes nothing"


@pytest.mark.parametrize("step", CASES)
def test_texts_that_a_step_changes_are_suspected(step):
    (parsed,) = parse_steps(step)
    built = build_text_step(parsed)
    texts = [before for before, after in CASES[step] if after is not None]
    assert pa.compute.match_substring_regex(pa.array(texts), built.suspects).to_pylist() == [True] * len(texts)


def test_escaped_tags_are_text():
    assert build_text_step(*parse_steps("html")).change("write &lt;b&gt; before it") == "write <b> before it"


def test_every_step_has_a_case():
    assert {step.partition("=")[0] for step in CASES} == set(TEXT_STEPS) - set(PREPARED_STEPS)


def test_changes_name_the_text_before_and_all_steps():
    texts = ["plain", "<b>Tom</b> &amp; @bob", "café"]
    ((array, changes),) = clean_column(texts, parse_steps("html,users,unicode,spelling"))
    assert array.to_pylist() == ["plain", "Tom & <user>", "café"]
    assert (changes.before, changes.steps) == ({1: texts[1]}, {1: ["html", "users"]})


@pytest.mark.parametrize("build", [list, TextColumn.build])
def test_rows_are_numbered_across_blocks(build):
    texts = build([f"text {i}" if i % 1000 else f"text <b>{i}</b>" for i in range(2 * CLEANED_AT_ONCE + 5)])
    blocks = list(clean_column(texts, parse_steps("html")))
    assert [len(array) for array, _ in blocks] == [CLEANED_AT_ONCE, CLEANED_AT_ONCE, 5]
    assert sorted(row for _, changes in blocks for row in changes.before) == list(range(0, len(texts), 1000))


def test_processes_give_the_same_texts_in_the_same_order(tmp_path):
    texts = StoredTexts.write(tmp_path / "t.parquet", (f"<i>{i}</i>  \t x" for i in range(3 * CLEANED_AT_ONCE)))
    steps = parse_steps("html,whitespace")
    alone, together = (list(clean_column(texts, steps, processes=count)) for count in (0, 2))
    assert [array.to_pylist() for array, _ in alone] == [array.to_pylist() for array, _ in together]
    assert [changes for _, changes in alone] == [changes for _, changes in together]
    assert alone[0][0][3].as_py() == "3 x"


def test_steps_that_need_data_are_left_out_without_it():
    assert [step.name for step in build_text_steps(parse_steps("names,spelling,html"))] == ["html"]


def test_prepared_steps_keep_their_place():
    built = build_text_steps(parse_steps("case,names,html"), {"names": lambda text: text.replace("Ann", "<name>")})
    assert [step.name for step in built] == ["html", "names", "case"]


def test_check_digits_tell_numbers_from_accounts_and_cards():
    assert has_valid_iban_digits("GB82 WEST 1234 5698 7654 32")
    assert not has_valid_iban_digits("GB83 WEST 1234 5698 7654 32")
    assert has_valid_card_digit("5500-0000-0000-0004")
    assert not has_valid_card_digit("0000 0000 0000 0000")
