"""Remembered hashes: large files of text are read once, until they change."""

import hashlib
import os

import pytest

from pipelines.runs import digests
from pipelines.runs.digests import DigestIndex


@pytest.fixture
def reads(monkeypatch):
    """Files are large from one byte on; returns the names of those that were read."""
    names: list[str] = []
    real = digests.hash_file
    monkeypatch.setattr(digests, "REMEMBERED_FROM", 1)
    monkeypatch.setattr(digests, "hash_file", lambda path: names.append(path.name) or real(path))
    return names


def test_an_unchanged_file_is_read_once_also_by_later_runs_and_after_renaming(tmp_path, reads):
    file, index = tmp_path / "a.parquet", tmp_path / "digests.json"
    file.write_bytes(b"text")
    expected = hashlib.sha256(b"text").hexdigest()
    first = DigestIndex(index, writes=True)
    assert [first.hash_file(file), first.hash_file(file)] == [expected] * 2
    renamed = file.rename(tmp_path / "b.parquet")
    assert DigestIndex(index, writes=False).hash_file(renamed) == expected
    assert reads == ["a.parquet"]


def test_a_file_that_changes_in_size_or_time_is_read_again(tmp_path, reads):
    file = tmp_path / "a.parquet"
    index = DigestIndex(tmp_path / "digests.json", writes=True)
    for content in (b"text", b"texts", b"test!"):
        file.write_bytes(content)
        os.utime(file, ns=(0, len(reads)))
        assert index.hash_file(file) == hashlib.sha256(content).hexdigest()
    assert len(reads) == 3


def test_weights_and_small_files_are_always_read(tmp_path, reads, monkeypatch):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"weights")
    index = DigestIndex(tmp_path / "digests.json", writes=True)
    for _ in range(2):
        index.hash_file(weights)
    monkeypatch.setattr(digests, "REMEMBERED_FROM", 100)
    text = tmp_path / "a.parquet"
    text.write_bytes(b"text")
    for _ in range(2):
        index.hash_file(text)
    assert reads == ["model.safetensors"] * 2 + ["a.parquet"] * 2
    assert not (tmp_path / "digests.json").exists()


def test_a_damaged_index_is_empty(tmp_path, reads):
    (tmp_path / "digests.json").write_text("[1")
    file = tmp_path / "a.txt"
    file.write_bytes(b"text")
    assert DigestIndex(tmp_path / "digests.json", writes=True).hash_file(file) == hashlib.sha256(b"text").hexdigest()
