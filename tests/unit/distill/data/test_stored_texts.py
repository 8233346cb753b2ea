"""Texts in a file equal the same texts in memory: sequences, held-out rows, splits, and the bytes that are written."""

import json
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distill.data.config import DataConfig
from distill.data.rows.documents import load_documents
from distill.data.sources import stored_texts, text_batches
from distill.data.sources.stored_texts import StoredTexts
from distill.data.splits import overlap
from distill.data.splits.examples import Examples

TEXTS = [f"text {i}" for i in range(50)]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(stored_texts, "TEXTS_IN_ARRAY", 7)


@pytest.fixture
def texts(tmp_path):
    return StoredTexts.write(tmp_path / "texts.parquet", iter(TEXTS))


def test_a_sequence_in_a_file_equals_the_list(texts):
    assert len(texts) == 50
    assert list(texts) == TEXTS
    assert list(texts.load()) == TEXTS
    assert [texts[0], texts[-1], texts[20]] == [TEXTS[0], TEXTS[-1], TEXTS[20]]
    assert texts[3:9] == TEXTS[3:9]
    assert texts.take([9, 3, 3, 49]) == [TEXTS[i] for i in (9, 3, 3, 49)]
    assert texts.take([]) == []
    assert Examples(texts).take([5, 1]).texts == [TEXTS[5], TEXTS[1]]
    with pytest.raises(IndexError):
        texts[50]


def test_held_out_rows_keep_their_order_also_if_more_are_held_out(texts):
    rng = np.random.default_rng(0)
    first = rng.random(50) < 0.3
    remaining, held_out = texts.separate(first)
    assert list(held_out) == [text for text, out in zip(TEXTS, first, strict=True) if out]
    second = rng.random(len(remaining)) < 0.3
    expected = [text for text, out in zip(TEXTS, first, strict=True) if not out]
    remaining_again, held_out_again = remaining.separate(second)
    assert list(held_out_again) == [text for text, out in zip(expected, second, strict=True) if out]
    assert list(remaining_again) == [text for text, out in zip(expected, second, strict=True) if not out]
    assert len(remaining_again) == len(list(remaining_again))
    assert remaining_again.take([4, 0]) == [list(remaining_again)[i] for i in (4, 0)]


def test_a_copy_has_the_bytes_of_a_table_that_is_written_at_once(texts, tmp_path):
    remaining, _ = texts.separate(np.arange(50) % 3 == 0)
    remaining.copy_to(tmp_path / "copy.parquet")
    pq.write_table(Examples(list(remaining)).table(), tmp_path / "plain.parquet")
    assert (tmp_path / "copy.parquet").read_bytes() == (tmp_path / "plain.parquet").read_bytes()


def test_row_groups_are_limited_in_rows_and_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(stored_texts, "GROUP_ROWS", 16)
    stored = StoredTexts.write(tmp_path / "rows.parquet", TEXTS)
    described = pq.ParquetFile(stored.file).metadata
    assert [described.row_group(i).num_rows for i in range(described.num_row_groups)] == [16, 16, 16, 2]
    assert list(stored) == TEXTS
    monkeypatch.setattr(stored_texts, "GROUP_BYTES", 1)
    assert pq.ParquetFile(StoredTexts.write(tmp_path / "bytes.parquet", TEXTS).file).num_row_groups == 8


@pytest.mark.parametrize("other_splits", [(), ("dev",), ("dev", "test")])
def test_splits_of_large_text_equal_those_read_at_once(tmp_path, monkeypatch, other_splits):
    rng = np.random.default_rng(1)
    for name in ("train", *other_splits):
        rows = [{"text": f"Text {rng.integers(40)}"} for _ in range(60)] + [{"text": " "}]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = DataConfig(str(tmp_path))
    expected = load_documents(config, 3)
    monkeypatch.setattr(text_batches, "LARGE", 1)
    monkeypatch.setattr(overlap, "KEYS_AT_ONCE", 11)
    (tmp_path / "scratch").mkdir()
    found = load_documents(config, 3, tmp_path / "scratch")
    for name in ("train", "validation", "test"):
        assert isinstance(getattr(found, name).texts, StoredTexts)
        assert list(getattr(found, name).texts) == list(getattr(expected, name).texts)
    assert found.notes == expected.notes
    assert found.remarks == expected.remarks


def test_a_file_with_other_row_groups_is_read_the_same(tmp_path):
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "texts.parquet", row_group_size=9)
    assert list(StoredTexts(tmp_path / "texts.parquet")) == TEXTS


def test_row_groups_that_were_read_are_not_held(tmp_path, monkeypatch):
    monkeypatch.setattr(stored_texts, "GROUP_ROWS", 500)
    draw = random.Random(0)
    texts = StoredTexts.write(tmp_path / "texts.parquet", (draw.randbytes(1000).hex() for _ in range(20_000)))
    start, peak = pa.total_allocated_bytes(), 0
    for array in texts.iterate_arrays():
        peak = max(peak, pa.total_allocated_bytes() - start)
        del array
    assert 0 < peak < 10_000_000  # of 40 MB
