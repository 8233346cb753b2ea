"""Tests stored tokens: equal to those of the same texts in memory, however many processes tokenize."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from distill.data.batches.packing import text_documents
from distill.data.batches.token_blocks import LanguageBlocks, token_blocks
from distill.data.stored.encoding import TokenizerProcesses, chunk_texts, encode_in_order, is_stock
from distill.data.stored.rows import StreamBlocks, TextRows
from distill.data.stored.tokens import HEADER, IDS, StoredTokens, write_tokens
from distill.errors import InputError
from support.tiny_models import FILLERS


def decoder_tokenizer(words: int = 0) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token per word and an end token, with `words` more than FILLERS."""
    names = ["[UNK]", "<eos>", *FILLERS, *(f"more{i}" for i in range(words))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(names)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", eos_token="<eos>")


def texts(count: int = 60) -> list[str]:
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(FILLERS, rng.integers(0, 30))) for _ in range(count)]


def stored(folder: Path, tokenizer, documents, processes: int = 0) -> StoredTokens:
    folder.mkdir(exist_ok=True)
    write_tokens(folder, tokenizer, iter(documents), processes=processes)
    return StoredTokens.open(folder)


@pytest.fixture(params=["framed", "decoder"])
def any_tokenizer(request, tokenizer):
    return tokenizer if request.param == "framed" else decoder_tokenizer()


@pytest.mark.parametrize("length", [5, 16, 10_000])
def test_blocks_of_stored_tokens_equal_those_of_texts_in_memory(tmp_path, any_tokenizer, length):
    expected = token_blocks(any_tokenizer, texts(), length)
    found = StreamBlocks.build(stored(tmp_path, any_tokenizer, texts()), any_tokenizer, length)
    assert len(found) == len(expected)
    assert all(
        np.array_equal(block, expected_block) and block.dtype == expected_block.dtype
        for block, expected_block in zip(found, expected, strict=True)
    )
    rows = LanguageBlocks(found)
    assert rows.lengths.tolist() == [len(row) for row in expected]
    assert rows.lengths.dtype == np.int64
    numbers = np.array([len(expected) - 1, 0])
    batch, plain = (each.collate(numbers, 0) for each in (rows, LanguageBlocks(expected)))
    assert all(batch[name].equal(value) for name, value in plain.items())


@pytest.mark.parametrize("limit", [0, 7])
def test_blocks_of_reordered_texts_equal_those_of_shuffled_texts_in_memory(tmp_path, any_tokenizer, limit):
    order = np.random.default_rng(4).permutation(60)
    expected = token_blocks(any_tokenizer, [texts()[i] for i in order], 11, limit=limit)
    found = StreamBlocks.build(stored(tmp_path, any_tokenizer, texts()), any_tokenizer, 11, order=order, limit=limit)
    assert [row.tolist() for row in found] == [row.tolist() for row in expected]
    for part in (slice(None, -3), slice(-3, None)):
        assert [row.tolist() for row in found[part]] == [row.tolist() for row in expected[part]]
        assert found[part].lengths.tolist() == [len(row) for row in expected[part]]


@pytest.mark.parametrize("length", [6, 16, 64])
def test_rows_of_stored_texts_equal_documents_in_memory(tmp_path, any_tokenizer, length):
    expected = text_documents(any_tokenizer, texts(), length)
    found = TextRows.build(stored(tmp_path, any_tokenizer, texts()), any_tokenizer, length)
    assert [row.tolist() for row in found] == [row.tolist() for row in expected.input_ids]
    assert found.lengths.tolist() == expected.lengths.tolist()
    assert LanguageBlocks(found, counted=found.counted).notes == expected.notes


def test_a_row_beyond_the_last_is_an_index_error(tmp_path, any_tokenizer):
    tokens = stored(tmp_path, any_tokenizer, texts(3))
    for rows in (StreamBlocks.build(tokens, any_tokenizer, 16), TextRows.build(tokens, any_tokenizer, 16)):
        assert np.array_equal(rows[-1], rows[len(rows) - 1])
        with pytest.raises(IndexError):
            rows[len(rows)]


def test_two_processes_write_the_same_bytes_as_none(tmp_path, any_tokenizer, monkeypatch):
    monkeypatch.setattr("distill.data.stored.encoding.CHARACTERS", 200)  # several chunks
    for processes in (0, 2):
        stored(tmp_path / str(processes), any_tokenizer, texts(), processes)
    for file in (tmp_path / "0").iterdir():
        assert (tmp_path / "2" / file.name).read_bytes() == file.read_bytes()


def test_ids_above_16_bits_are_stored_whole(tmp_path):
    tokenizer = decoder_tokenizer(words=70_000)
    tokens = stored(tmp_path, tokenizer, ["more69999 more3"])
    assert tokens.ids.dtype == np.uint32
    assert tokens.ids.tolist() == [*tokenizer("more69999 more3")["input_ids"], tokenizer.eos_token_id]


def test_no_text_gives_no_blocks_and_is_rejected_as_rows(tmp_path, any_tokenizer):
    tokens = stored(tmp_path, any_tokenizer, [])
    assert list(StreamBlocks.build(tokens, any_tokenizer, 16)) == []
    with pytest.raises(InputError, match="nothing to predict"):
        TextRows.build(tokens, any_tokenizer, 16)


def test_rules_written_in_python_are_applied_in_this_process(monkeypatch):
    class Reversing(PreTrainedTokenizerFast):
        def _encode_plus(self, text, *args, **settings):
            return super()._encode_plus([each[::-1] for each in text], *args, **settings)

    plain = decoder_tokenizer()
    reversing = Reversing(tokenizer_object=plain.backend_tokenizer, unk_token="[UNK]", eos_token="<eos>")
    assert is_stock(plain)
    assert not is_stock(reversing)
    monkeypatch.setattr(TokenizerProcesses, "__enter__", lambda self: pytest.fail("a process was started"))
    word = FILLERS[0]
    ((ids, lengths),) = encode_in_order(reversing, [word[::-1]], processes=2)
    assert ids.tolist() == plain(word)["input_ids"]
    assert lengths.tolist() == [1]


def test_a_process_that_ends_is_an_error_and_not_a_wait(any_tokenizer):
    with TokenizerProcesses(any_tokenizer, 1) as pool:
        pool.started[0].kill()
        pool.started[0].wait()
        with pytest.raises(RuntimeError, match="a process ended before its answer"):
            pool.encode(["one"])


def test_processes_end_when_the_consumer_stops_early(any_tokenizer, monkeypatch):
    monkeypatch.setattr("distill.data.stored.encoding.CHARACTERS", 200)
    started = []
    enter = TokenizerProcesses.__enter__
    monkeypatch.setattr(TokenizerProcesses, "__enter__", lambda self: started.append(self) or enter(self))
    encoded = encode_in_order(any_tokenizer, texts(), processes=2)
    next(encoded)
    encoded.close()
    assert [process.poll() for process in started[0].started] == [0, 0]


def test_chunks_keep_the_order_and_stay_within_their_sizes(monkeypatch):
    monkeypatch.setattr("distill.data.stored.encoding.CHARACTERS", 10)
    monkeypatch.setattr("distill.data.stored.encoding.ROWS", 3)
    chunks = list(chunk_texts(["a", "b", "c", "d" * 30, "e" * 6, "f" * 6, "g"]))
    assert chunks == [["a", "b", "c"], ["d" * 30], ["e" * 6, "f" * 6], ["g"]]


def test_an_incomplete_or_truncated_folder_is_rejected(tmp_path, any_tokenizer):
    stored(tmp_path, any_tokenizer, texts())
    content = (tmp_path / IDS).read_bytes()
    (tmp_path / IDS).write_bytes(content[:-1])
    with pytest.raises(InputError, match="ids are missing"):
        StoredTokens.open(tmp_path)
    (tmp_path / IDS).write_bytes(content)
    header = json.loads((tmp_path / HEADER).read_text())
    (tmp_path / HEADER).write_text(json.dumps(header | {"format": 2}))
    with pytest.raises(InputError, match="expected format 1, found 2"):
        StoredTokens.open(tmp_path)
    (tmp_path / HEADER).unlink()
    with pytest.raises(InputError, match="expected a header"):
        StoredTokens.open(tmp_path)
