"""Tests that texts read one after another equal those of the whole source, and that errors are the same."""

import codecs
import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distill.data.sources import text_batches
from distill.data.sources.text_batches import find_large_text, stream_texts
from distill.data.sources.text_files import read_texts
from distill.errors import InputError

ROWS = ["one", "", "  ", "two\nlines", None, "ünïcode", *map(str, range(40))]


@pytest.fixture(autouse=True)
def _every_source_is_large(monkeypatch):
    monkeypatch.setattr(text_batches, "LARGE", 1)
    monkeypatch.setattr(text_batches, "ROWS_AT_ONCE", 7)


def write_source(folder, kind):
    if kind == "txt":
        for number, text in enumerate(ROWS):
            (folder / f"{number:03}.txt").write_text(text or "")
        return folder
    file = folder / f"train.{kind}"
    if kind == "parquet":
        pq.write_table(pa.table({" Text ": ROWS, "other": list(range(len(ROWS)))}), file, row_group_size=20)
    elif kind in ("jsonl", "json"):
        file.write_text("\n".join(json.dumps({"Text": text, "other": i}) for i, text in enumerate(ROWS)))
    else:
        separator = {"csv": ";", "tsv": "\t"}[kind.removesuffix(".gz")]
        rows = [f" Text {separator}other", "", *(f'"{text or ""}"{separator}{i}' for i, text in enumerate(ROWS))]
        content = codecs.BOM_UTF8 + "\r\n".join(rows).encode()
        file.write_bytes(gzip.compress(content) if kind.endswith(".gz") else content)
    return file


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "json", "csv", "tsv", "csv.gz", "txt"])
def test_texts_read_one_after_another_equal_those_read_at_once(tmp_path, kind):
    source = write_source(tmp_path, kind)
    assert find_large_text(str(source)).count_rows() == len(ROWS)
    assert list(stream_texts(str(source))) == read_texts(str(source))
    assert list(stream_texts(str(tmp_path))) == read_texts(str(tmp_path))


def test_rows_of_json_may_lack_the_column(tmp_path):
    (tmp_path / "train.jsonl").write_text("".join(f'{{"other": {i}}}\n' for i in range(9)) + '{"text": "last"}\n')
    assert list(stream_texts(str(tmp_path))) == read_texts(str(tmp_path)) == ["last"]


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "csv", "txt"])
def test_a_column_that_does_not_exist_is_rejected_as_when_read_at_once(tmp_path, kind):
    source = str(write_source(tmp_path, kind))
    with pytest.raises(InputError) as expected:
        read_texts(source, "body")
    with pytest.raises(InputError) as found:
        list(stream_texts(source, "body"))
    assert str(found.value) == str(expected.value)


def test_a_damaged_row_is_named_when_it_is_reached(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n' * 10 + "no json\n")
    texts = stream_texts(str(tmp_path))
    assert [next(texts) for _ in range(7)] == ["a"] * 7
    with pytest.raises(InputError, match="row 11 is not JSON"):
        list(texts)


CELLS = {
    "a row of three cells": ["a,b", *["c,d"] * 20, "e,f,g"],
    "a quote that is closed too early": ["text,b", *['"c",d'] * 20, '"e"f,g'],
    "bytes that are not UTF-8": ["text,b", *["c,d"] * 20, "\udce9,f"],
    "two columns of one name": ["text,text", *["c,d"] * 20],
    "a blank before quotes": ['text, "b"', *["c,d"] * 20],
}


@pytest.mark.parametrize("case", CELLS)
def test_a_damaged_csv_file_is_rejected_as_when_read_at_once(tmp_path, case):
    file = tmp_path / "train.csv"
    file.write_bytes("\n".join(CELLS[case]).encode("utf-8", "surrogateescape"))
    with pytest.raises(InputError) as expected:
        read_texts(str(file))
    with pytest.raises(InputError) as found:
        list(stream_texts(str(file)))
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize(
    "document", ['[\n{"text": "a"}\n]', '{"data": [{"text": "a"}]}', '{\n"data": [{"text": "a"}]}']
)
def test_a_json_document_is_read_at_once(tmp_path, document):
    (tmp_path / "train.json").write_text(document)
    assert find_large_text(str(tmp_path)) is None
    assert list(stream_texts(str(tmp_path))) == ["a"]


def test_a_source_without_text_is_rejected(tmp_path):
    pq.write_table(pa.table({"text": ["", " "]}), tmp_path / "train.parquet")
    with pytest.raises(InputError, match="found none in 2 documents"):
        list(stream_texts(str(tmp_path)))


def test_classes_as_texts_are_read_at_once(tmp_path):
    import datasets

    rows = datasets.Dataset.from_dict({"text": [0, 1]}).cast_column("text", datasets.ClassLabel(names=["no", "yes"]))
    rows.to_parquet(tmp_path / "train.parquet")
    assert find_large_text(str(tmp_path)) is None
    assert list(stream_texts(str(tmp_path))) == ["no", "yes"]
