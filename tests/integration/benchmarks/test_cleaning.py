"""Damage that is put into data on purpose, and the judgement of what cleaning makes of it."""

from benchmarks.data.cleaning import follow_texts, score_changes
from benchmarks.data.damage import DamagedRow, Shares, add_typography, damage_rows, decode_wrongly

TEXTS = [f"please tell me where my new card number {row} is and why it hasn't arrived" for row in range(100)]
CLASSES = [str(row % 4) for row in range(100)]


def test_as_much_is_damaged_as_requested_and_the_seed_decides_where():
    rows = damage_rows(TEXTS, CLASSES, Shares(), 0)
    word_count = sum(len(row.original.split()) for row in rows)
    assert len(rows) == 120
    assert sum(row.is_copy for row in rows) == 20
    assert sum(row.is_mislabelled for row in rows) == sum(row.is_wrongly_decoded for row in rows) == 12
    assert 0.09 < sum(len(row.typos) for row in rows) / word_count < 0.11
    assert rows == damage_rows(TEXTS, CLASSES, Shares(), 0)
    assert rows != damage_rows(TEXTS, CLASSES, Shares(), 1)
    for row in rows:
        assert row.is_mislabelled == (row.label != CLASSES[row.source])
        assert all(wrong in row.text and right in row.original for right, wrong in row.typos)


def test_a_wrong_encoding_shows_where_typography_stood():
    assert decode_wrongly(add_typography("it isn't")) == "it isnâ€™t"
    assert decode_wrongly(add_typography("it is")) == "it isâ€¦"


def make_rows() -> list[DamagedRow]:
    return [
        DamagedRow("my crad, acount", "a", "my card, account", 0, typos=[("card", "crad"), ("account", "acount")]),
        DamagedRow("it isnâ€™t", "a", "it isn’t", 1, is_wrongly_decoded=True),
        DamagedRow("hi it is fine", "a", "hi it is fine", 2, is_copy=True),
        DamagedRow("it is fine", "a", "it is fine", 2),
        DamagedRow("wrong", "b", "wrong", 3, is_mislabelled=True),
        DamagedRow("right", "a", "right", 4),
    ]


def change(row: int, before: str, after: str | None, why: str) -> dict:
    return {"split": "train", "row": row, "before": before, "after": after, "why": why}


def test_repairs_drops_and_mistakes_are_counted_by_type():
    changes = [
        change(0, "my crad, acount", "my card, acount", "spelling"),
        change(1, "it isnâ€™t", "it isn’t", "encoding"),
        change(3, "it is fine", None, "near-duplicates: nearly equals 'hi it is fine'"),
        change(4, "wrong", None, "labels: b is probably a"),
        change(5, "right", None, "labels: a is probably b"),
    ]
    rows = make_rows()
    assert score_changes(rows, follow_texts(rows, changes)) == [
        ("typos", "50.0%", "100.0%", "2"),
        ("wrong encodings", "100.0%", "100.0%", "1"),
        ("near duplicates", "100.0%", "100.0%", "1"),
        ("wrong labels", "100.0%", "50.0%", "1"),
    ]


def test_a_wrong_label_is_repaired_when_its_row_is_dropped_or_left_without_it():
    rows = make_rows()
    for after in (None, "wrong"):
        judged = score_changes(rows, follow_texts(rows, [change(4, "wrong", after, "labels: b is probably a")]))
        assert judged[-1] == ("wrong labels", "100.0%", "100.0%", "1")


def test_consecutive_changes_of_a_row_are_followed_by_its_text():
    rows = [DamagedRow("one  x", "a", "one x", 0), DamagedRow("one  x", "a", "one x", 1)]
    changes = [
        change(7, "one  x", "one x", "whitespace"),
        change(9, "one  x", "one x", "whitespace"),
        change(9, "one x", None, "duplicates: equals 'one x'"),
    ]
    assert follow_texts(rows, changes) == [("one x", ["whitespace"]), (None, ["whitespace", "duplicates"])]
