"""Texts of a data set stay in Arrow until a batch is tokenized."""

import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from datasets import ClassLabel, Features, List, Value

from distill.data.batches import encode as encoding
from distill.data.config import DataConfig
from distill.data.sources.json_rows import _TableBuilder
from distill.data.sources.tables import _name_classes
from distill.data.sources.text_column import BLOCK_ROWS, WHITESPACE, TextColumn, strip_texts
from distill.data.splits.examples import Examples
from distill.data.splits.labelled import load_splits
from distill.errors import InputError

TEXTS = [f"text {number}" for number in range(2 * BLOCK_ROWS + 7)]
COLUMN = TextColumn(pa.chunked_array([TEXTS[:5], TEXTS[5:]]))


def test_a_column_reads_like_the_list_of_its_texts():
    assert list(COLUMN) == TEXTS
    assert (COLUMN[0], COLUMN[-1], COLUMN[np.int64(9)]) == (TEXTS[0], TEXTS[-1], TEXTS[9])
    assert list(COLUMN[3:7]) == TEXTS[3:7]
    assert list(COLUMN[::-500]) == TEXTS[::-500]
    assert list(COLUMN[5:2]) == []
    assert COLUMN == TEXTS
    assert TEXTS == COLUMN
    assert TEXTS[:-1] != COLUMN
    assert [*TEXTS, "more"] == COLUMN + ["more"]
    assert COLUMN.take([4, 0, 4]) == [TEXTS[4], TEXTS[0], TEXTS[4]]
    assert COLUMN.take(np.arange(len(TEXTS))) is COLUMN
    assert (TEXTS[6] in COLUMN, "none" in COLUMN) == (True, False)
    with pytest.raises(IndexError):
        COLUMN[len(TEXTS)]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view(), "dictionary"])
def test_texts_are_stripped_as_python_strips_them(kind):
    rng = random.Random(0)
    characters = WHITESPACE + "ab\u200b\ufeff\x00é𝄞"
    texts = [*("".join(rng.choices(characters, k=rng.randint(0, 6))) for _ in range(3000)), None]
    array = pa.array(texts).dictionary_encode() if kind == "dictionary" else pa.array(texts, kind)
    column = strip_texts(pa.chunked_array([array]))
    assert column is not None
    assert list(column) == [(text or "").strip() for text in texts]
    assert column.find_nonempty().tolist() == [bool((text or "").strip()) for text in texts]


def test_columns_of_other_types_are_not_taken_for_texts():
    assert strip_texts(pa.chunked_array([pa.array([1, 2])])) is None


def test_a_column_is_written_in_one_piece_as_the_list_is(tmp_path):
    for name, texts in (("list", TEXTS), ("column", COLUMN)):
        pa.parquet.write_table(Examples(texts, None, [0] * len(TEXTS)).table(), tmp_path / name)
    assert (tmp_path / "list").read_bytes() == (tmp_path / "column").read_bytes()
    read = Examples.from_table(pa.parquet.read_table(tmp_path / "column"))
    assert isinstance(read.texts, TextColumn)
    assert read.texts == TEXTS


def test_loaded_texts_stay_in_arrow(tmp_path):
    labels = ["a", "b"] * 30
    for split in ("train", "test", "validation"):
        table = pa.table({"text": [f"{split} {number}" for number in range(60)], "label": labels})
        pa.parquet.write_table(table, tmp_path / f"{split}.parquet")
    splits = load_splits(DataConfig(path=str(tmp_path)))
    assert isinstance(splits.train.texts, TextColumn)
    assert splits.train.texts[59] == "train 59"
    assert splits.train.labels == [0, 1] * 30


def test_texts_are_tokenized_in_parts_with_the_same_result(tokenizer, monkeypatch):
    texts = TextColumn.build(["ba ka " * (number % 20) + "so" for number in range(50)])
    whole = encoding.encode_samples(tokenizer, Examples(texts, texts, [0] * 50), 16)
    monkeypatch.setattr(encoding, "ENCODED_AT_ONCE", 7)
    parts = encoding.encode_samples(tokenizer, Examples(texts, texts, [0] * 50), 16)
    assert whole.truncated == parts.truncated > 0
    for name in ("input_ids", "token_type_ids"):
        mine, theirs = getattr(whole, name), getattr(parts, name)
        assert all(np.array_equal(one, other) for one, other in zip(mine, theirs, strict=True))


def test_class_numbers_are_replaced_by_names_in_arrow():
    names = ["low", "mid", "high"]
    features = Features(
        {"label": ClassLabel(names=names), "tags": List(ClassLabel(names=names)), "text": Value("string")}
    )
    table = pa.table(
        {
            "label": pa.chunked_array([pa.array([2, None, -1, 0]), pa.array([1])]),
            "tags": pa.chunked_array([pa.array([[0, 1], None, [], [2, None, -1]]), pa.array([[1]])]),
            "text": list("abcde"),
        }
    )
    named = _name_classes(table, features, "data")
    assert named["label"].to_pylist() == ["high", None, None, "low", "mid"]
    assert named["tags"].to_pylist() == [["low", "mid"], None, [], ["high", None, None], ["mid"]]
    assert named["tags"].type == pa.list_(pa.string())
    wrong = table.set_column(0, "label", pa.chunked_array([pa.array([0, 1, 2]), pa.array([3, 4])]))
    with pytest.raises(InputError, match=r"row 4, column 'label': expected the number of a class .*, found 3: it has"):
        _name_classes(wrong, features, "data")


def test_json_objects_become_a_table_block_by_block():
    rows = _TableBuilder()
    for number in range(BLOCK_ROWS + 2):
        rows.add({"text": f"t{number}"} | ({"late": [number]} if number == BLOCK_ROWS + 1 else {}))
    table = rows.build()
    assert table.column_names == ["text", "late"]
    assert table["text"].to_pylist() == [f"t{number}" for number in range(BLOCK_ROWS + 2)]
    assert table["late"].to_pylist() == [None] * (BLOCK_ROWS + 1) + [f"[{BLOCK_ROWS + 1}]"]
    assert [bool(field.metadata) for field in table.schema] == [False, True]
