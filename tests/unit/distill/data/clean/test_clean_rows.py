"""Tests of the cleaning of splits: which rows change, which are dropped, what is recorded, and what is left alone."""

from pathlib import Path

import pytest

from distill.data.clean.config import CleanConfig
from distill.data.clean.deployment import PREPROCESSING, read_preprocessing, write_preprocessing
from distill.data.clean.rows import CleanedRow, Cleaning, JoinedTexts, find_duplicates
from distill.data.rows.tagged import Tagged
from distill.data.sources.stored_texts import StoredTexts
from distill.data.sources.text_column import TextColumn
from distill.data.splits.examples import Examples, Splits
from distill.errors import InputError

NOTHING = Examples([], None)
LISTED = frozenset(["my", "card", "has", "not", "how", "long", "does", "arrive", "account", "please", "where"])
TRAIN = [
    "My card has not arrived.",
    "my card has not arrived",
    "My crad has not <b>arrived</b> &amp; where is it",
    "How long does a transfer take to arrive in my account?",
    "How long does a transfer take to arrive in my account please?",
    "Meine Karte ist noch nicht angekommen, was soll ich jetzt tun?",
    "<br>",
    *["my card has not arrived, where is it"] * 3,
]
LABELS = [0, 1, 0, 1, 1, 0, 1, 0, 0, 0]
TEST = ["My crad has <i>not</i> arrived.", "How long does a transfer take to arrive in my account?"]


def clean(splits: Splits, folder: Path, steps: str, deploy: str = "") -> tuple[Splits, list[CleanedRow], Cleaning]:
    rows: list[CleanedRow] = []
    cleaning = Cleaning(CleanConfig(steps=steps, deploy=deploy), LISTED, rows.append, folder)
    return cleaning.clean(splits), rows, cleaning


def make_splits(train, test=None, unlabelled=NOTHING) -> Splits:
    return Splits(("a", "b"), train, NOTHING, test or Examples(TEST, None, [0, 1]), unlabelled, {"kept": 1})


@pytest.fixture
def cleaned(tmp_path):
    splits = make_splits(Examples(TextColumn.build(TRAIN), None, LABELS))
    return clean(splits, tmp_path, "standard,spelling,overlap", deploy="html")


def test_texts_are_changed_and_rows_dropped_with_their_labels(cleaned):
    splits, _, _ = cleaned
    assert list(splits.train.texts) == [TRAIN[0], "My card has not arrived & where is it"]
    assert splits.train.labels == [0, 0]


def test_every_change_is_recorded_with_its_row_and_reason(cleaned):
    _, rows, _ = cleaned
    reasons = {(row.row, row.after is None): row.why for row in rows if row.split == "train"}
    assert reasons[2, False] == "html" or reasons[2, False] == "spelling"
    assert [row.why for row in rows if row.row == 2 and row.split == "train"] == ["html", "spelling"]
    assert reasons[1, True] == f"duplicates: equals {TRAIN[0]!r}, which has another label"
    assert reasons[4, True].startswith(f"near-duplicates: nearly equals {TRAIN[3]!r}") or "overlap" in reasons[4, True]
    assert reasons[3, True] == f"overlap: nearly equals a row of test: {TEST[1]!r}"
    assert reasons[5, True] == "language: language de, not en"
    assert reasons[6, True] == "empty: no text is left"
    assert {row for row, dropped in reasons if dropped} == set(range(1, 10)) - {2}


def test_the_test_split_keeps_its_rows_and_labels_and_is_cleaned_as_in_deployment(cleaned):
    splits, rows, _ = cleaned
    assert list(splits.test.texts) == ["My crad has not arrived.", TEST[1]]
    assert splits.test.labels == [0, 1]
    assert [(row.row, row.why) for row in rows if row.split == "test"] == [(0, "html")]


def test_counts_by_split_and_step_are_in_the_notes(cleaned):
    splits, _, cleaning = cleaned
    assert splits.notes["kept"] == 1
    assert splits.notes["clean_train_changed_spelling"] == cleaning.counts["train_changed_spelling"] == 1
    assert splits.notes["clean_test_changed_html"] == 1
    remarks = cleaning.describe()
    assert f"clean: test, changed by html: 1 rows, such as {TEST[0]!r} to {splits.test.texts[0]!r}" in remarks
    assert any(each.startswith("clean: train, dropped by duplicates: ") for each in remarks)


def test_a_doubtful_label_is_recorded_with_the_number_of_its_row_before_cleaning(tmp_path):
    train = Examples(["one", "One!", "two", "three"], None, [0, 0, 1, 1])
    changed, rows, cleaning = clean(make_splits(train), tmp_path, "duplicates,labels=relabel")
    cleaning.add_label(1, changed.train, 1, 0, changed.labels, "relabel", 0.973)
    assert rows[-1] == CleanedRow(
        "train", 2, "two", "two", "labels: b is wrong with a probability of 97%, most likely it is a"
    )
    cleaning.add_label(1, changed.train, 1, 0, changed.labels, "drop", 0.6)
    assert rows[-1].after is None
    assert cleaning.counts["train_changed_labels"] == cleaning.counts["train_dropped_labels"] == 1


def test_without_steps_of_deployment_the_test_split_is_left_alone(tmp_path):
    splits = make_splits(Examples(TRAIN, None, LABELS))
    changed, rows, _ = clean(splits, tmp_path, "html,case,duplicates")
    assert changed.test is splits.test
    assert {row.split for row in rows} == {"train"}


def test_both_texts_of_a_pair_are_cleaned_and_compared(tmp_path):
    train = Examples(["<b>one</b>", "one", "One!"], ["two", "other <i>text</i>", "two"], [0, 1, 0])
    changed, rows, _ = clean(make_splits(train, Examples([], [], [])), tmp_path, "html,duplicates")
    assert (list(changed.train.texts), list(changed.train.pairs)) == (["one", "one"], ["two", "other text"])
    assert [(row.row, row.before, row.after) for row in rows] == [
        (0, "<b>one</b>\ntwo", "one\ntwo"),
        (1, "one\nother <i>text</i>", "one\nother text"),
        (2, "One!\ntwo", None),
    ]


def test_words_keep_their_tags_and_never_split_or_vanish(tmp_path):
    train = Tagged([["My", "crad", "<b>", "&amp;"], ["my", "card", "is", "here"]] + [["my", "card"]] * 9,
                   [[0, 1, 0, 0], [0, 1, 0, 0]] + [[0, 1]] * 9)  # fmt: skip
    test = Tagged([["a"]], [[0]])
    changed, rows, _ = clean(make_splits(train, test, Tagged([])), tmp_path, "html,spelling")
    assert changed.train.texts[0] == ["My", "card", "<b>", "&"]
    assert changed.train.labels == train.labels
    assert [(row.row, row.before, row.after) for row in rows] == [
        (0, "My crad <b> &amp;", "My crad <b> &"),
        (0, "My crad <b> &", "My card <b> &"),
    ]
    assert list(JoinedTexts(train))[1] == "my card is here"


def test_the_space_before_a_word_is_kept_and_not_counted_as_a_change(tmp_path):
    rows = [["My", " crad", " <b>", " &amp;"], ["my", " card", " is", " here"]] + [["my", " card"]] * 9
    train = Tagged(rows, [[0, 1, 0, 0], [0, 1, 0, 0]] + [[0, 1]] * 9)
    changed, recorded, _ = clean(make_splits(train, Tagged([[]]), Tagged([])), tmp_path, "html,whitespace,spelling")
    assert changed.train.texts == [["My", " card", " <b>", " &"], *rows[1:]]
    assert {row.row for row in recorded} == {0}


def test_text_in_a_file_is_cleaned_into_a_file(tmp_path):
    texts = [f"line <i>{i}</i> of a long book" if i % 2 else "" for i in range(20_000)] + ["line 1 of a long book!"]
    stored = StoredTexts.write(tmp_path / "train.parquet", texts)
    splits = make_splits(Examples(stored, None), Examples(["a"], None))
    changed, rows, _ = clean(splits, tmp_path / "scratch", "html,duplicates")
    assert isinstance(changed.train.texts, StoredTexts)
    assert list(changed.train.texts) == [f"line {i} of a long book" for i in range(1, 20_000, 2)]
    assert sum(row.why == "html" for row in rows) == 10_000
    assert [row.row for row in rows if row.why.startswith("duplicates")] == [20_000]


def test_duplicates_are_found_without_case_and_punctuation():
    part = Examples(["One, two", "three", "one two!", "ONE TWO", "three"], None, [0, 1, 0, 1, 1])
    assert find_duplicates(part) == {
        2: "equals 'One, two'",
        3: "equals 'One, two', which has another label",
        4: "equals 'three'",
    }


def test_a_deployed_model_cleans_texts_as_in_training(tmp_path):
    splits = make_splits(Examples(TRAIN, None, LABELS))
    changed, _, cleaning = clean(splits, tmp_path, "html,whitespace,spelling", deploy="html,whitespace,spelling")
    write_preprocessing(tmp_path, cleaning.config.find_deployed(), cleaning.speller)
    clean_text = read_preprocessing(tmp_path)
    assert [clean_text(text) for text in TEST] == list(changed.test.texts) == [
        "My card has not arrived.", TEST[1]
    ]  # fmt: skip


def test_without_the_file_texts_stay_and_a_damaged_one_is_rejected(tmp_path):
    assert read_preprocessing(tmp_path)("<b>  x") == "<b>  x"
    (tmp_path / PREPROCESSING).write_text('{"clean_texts_by": "no-such-step"}')
    with pytest.raises(InputError, match="expected the steps of cleaning, found a damaged file"):
        read_preprocessing(tmp_path)


@pytest.mark.parametrize(
    ("train", "steps", "deploy"),
    [
        (Examples(TextColumn.build(TRAIN), None, LABELS), "standard,spelling", "html"),
        (Examples(TRAIN, TRAIN[::-1], LABELS), "html,duplicates", ""),
        (Tagged([["My", " <b>"], ["card"]], [[0, 0], [0]]), "html,spelling", "html"),
    ],
)
def test_progress_ends_at_the_work_that_was_counted(train, steps, deploy, tmp_path):
    test = train if isinstance(train, Tagged) else None
    splits, advances = make_splits(train, test), []
    cleaning = Cleaning(CleanConfig(steps=steps, deploy=deploy), LISTED, lambda row: None, tmp_path)
    cleaning.advance = advances.append
    cleaning.clean(splits)
    assert sum(advances) == cleaning.count_work(splits)


@pytest.mark.parametrize("is_stored", [False, True])
def test_a_stopped_cleaning_goes_on_and_ends_as_an_undisturbed_one(is_stored, tmp_path, monkeypatch):
    monkeypatch.setattr("distill.data.clean.rows.KEPT_FROM", 1)
    texts = StoredTexts.write(tmp_path / "texts.parquet", TRAIN) if is_stored else TextColumn.build(TRAIN)
    splits = make_splits(Examples(texts, None, [] if is_stored else LABELS))
    expected, rows, _ = clean(splits, tmp_path / "undisturbed", "standard,spelling")
    work, started = Cleaning._clean_texts, []

    def stop_at_spelling(self, split, part, steps):
        if steps and len(part):
            started.append(steps[0].name)
            if steps[0].name == "spelling" and started.count("spelling") == 1:
                raise KeyboardInterrupt
        return work(self, split, part, steps)

    monkeypatch.setattr(Cleaning, "_clean_texts", stop_at_spelling)
    with pytest.raises(KeyboardInterrupt):
        clean(splits, tmp_path / "stopped", "standard,spelling")
    again, others, cleaning = clean(splits, tmp_path / "stopped", "standard,spelling")
    assert started == ["encoding", "spelling", "spelling"], "what was finished isn't done again"
    assert others == rows
    assert list(again.train.texts) == list(expected.train.texts)
    assert again.train.labels == expected.train.labels
    assert again.notes == expected.notes
    assert cleaning.counts["train_dropped_duplicates"] > 0
