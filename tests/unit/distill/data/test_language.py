"""Tests plain text and masks for language models: reading, splitting into blocks, and masks of samples."""

import json
import subprocess
import sys
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from distill.data.batches.batches import EvalBatches, TrainBatches
from distill.data.batches.token_blocks import TEXTS_AT_ONCE, LanguageBlocks, token_blocks
from distill.data.masking.masks import MaskConfig, MaskedBlocks, mask_tokens, to_regular_ids
from distill.data.sources.text_files import read_texts
from distill.errors import InputError
from distill.losses.logits import IGNORED
from support.tiny_models import FILLERS, VOCABULARY, make_rows

ENDINGS = (".parquet", ".csv", ".tsv", ".json", ".jsonl", ".conll")
TEXTS = [text for text, _ in make_rows(60, 3)]
SPECIALS = (0, 1, 2, 3, 4)
FACTS = {"mask_id": 4, "vocabulary": len(VOCABULARY), "special_ids": SPECIALS}


def decoder_tokenizer(**tokens: str) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token per word, and no cls or sep token unless passed in `tokens`."""
    words = {word: i for i, word in enumerate(["[UNK]", "<eos>", *FILLERS])}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", **tokens)


def rejection(call, *args, **settings) -> str:
    with pytest.raises(InputError) as caught:
        call(*args, **settings)
    return str(caught.value)


def write(folder, files: dict[str, str]):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text.encode())
    return folder


def samples(count: int, length: int = 64, seed: int = 0) -> list[np.ndarray]:
    """Returns samples of cls, tokens and sep with a special token in the middle: int64 [length] each."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(len(SPECIALS), len(VOCABULARY), (count, length))
    rows[:, 0], rows[:, length // 2], rows[:, -1] = 2, 3, 3
    return list(rows)


def masked_blocks(tokenizer, count: int = 12, **changes) -> MaskedBlocks:
    lengths = np.random.default_rng(1).integers(3, 40, count)
    rows = [row[:length] for row, length in zip(samples(count), lengths, strict=True)]
    return MaskedBlocks.build(LanguageBlocks(rows), MaskConfig(**changes), tokenizer)


# --- sources


def test_documents_are_read_unchanged_but_for_a_byte_order_mark(tmp_path):
    text = "  ünïcode 中文 \U0001f600\r\n\ttwo\n\n"
    write(tmp_path, {"a.txt": text, "b.TXT": "\ufeffmarked"})
    assert read_texts(str(tmp_path / "a.txt")) == [text]
    assert read_texts(str(tmp_path / "b.TXT")) == ["marked"]


def test_documents_of_a_folder_are_read_in_path_order(tmp_path):
    write(tmp_path, {"b.txt": "2", "a/z.txt": "1", "c/c/c.TXT": "3", "d.txt": " \n", "notes.md": "no"})
    assert read_texts(str(tmp_path)) == ["1", "2", "3"]


@pytest.mark.parametrize("ending", [".txt", "/1.txt"])
def test_split_files_are_read_separately_and_rejected_beside_other_files(tmp_path, ending):
    write(tmp_path, {f"train{ending}": "a", f"Valid{ending}": "b", f"test{ending}": "c"})
    assert [read_texts(str(tmp_path), split=split) for split in ("train", "validation", "test")] == [
        ["a"],
        ["b"],
        ["c"],
    ]
    write(tmp_path, {f"other{ending}": "d"})
    message = rejection(read_texts, str(tmp_path))
    assert "expected names of splits only, or none" in message
    assert f"other{ending}" in message
    assert "text held out for the test would be trained on" in message


def test_a_document_named_like_a_split_does_not_hide_the_others(tmp_path):
    assert read_texts(str(write(tmp_path, {"test.txt": "b", "essay.txt": "a"}))) == ["a", "b"]


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl", "parquet"])
def test_every_table_format_gives_the_same_texts(tmp_path, ending):
    rows, file = [("one", "x"), ("", "y"), ("two", "z")], tmp_path / f"train.{ending}"
    if ending == "parquet":
        pq.write_table(pa.table({"Text": [t or None for t, _ in rows], "body": [b for _, b in rows]}), file)
    elif ending == "jsonl":
        file.write_text("".join(json.dumps({"Text": t, "body": b}) + "\n" for t, b in rows))
    else:
        file.write_text(
            "".join(("," if ending == "csv" else "\t").join(row) + "\n" for row in [("Text", "body"), *rows])
        )
    write(tmp_path, {"readme.txt": "not the text"})
    for path in (file, tmp_path):
        assert read_texts(str(path)) == ["one", "two"]
        assert read_texts(str(path), "body") == ["x", "y", "z"]


def test_the_requested_split_and_subset_of_a_data_set_are_read(tmp_path, monkeypatch):
    tables = {"train": pa.table({"text": ["a"]}), "test": pa.table({"text": pa.array(["b"]).dictionary_encode()})}
    requested = []
    monkeypatch.setattr(
        "distill.data.sources.tables._read_hub", lambda name, subset: requested.append((name, subset)) or tables
    )
    assert read_texts("owner/name", split="test", subset="raw") == ["b"]
    assert requested == [("owner/name", "raw")]
    assert rejection(read_texts, "owner/name", split="validation") == (
        "data 'owner/name': expected a split 'validation', found train, test: nothing would be read"
    )


def test_a_byte_that_is_not_utf8_is_rejected_with_its_file_and_offset(tmp_path):
    (tmp_path / "good.txt").write_text("good")
    bad = tmp_path / "sub" / "bad.txt"
    bad.parent.mkdir()
    bad.write_bytes(b"\xef\xbb\xbfcaf\xe9 au lait")
    assert rejection(read_texts, str(tmp_path)) == (
        f"data {str(bad)!r}: expected text in UTF-8, found 0xe9 at byte 6 (line 1): "
        "the model would learn wrong characters"
    )


@pytest.mark.parametrize(
    ("name", "files", "settings", "named"),
    [
        ("none.txt", {}, {}, "expected a txt file, found no such file: nothing would be read"),
        ("none", {}, {}, "no such file or folder"),
        (
            "a.md",
            {"a.md": "a"},
            {},
            f"expected an extension among .txt, {', '.join(ENDINGS)}, each also with .gz, found '.md'",
        ),
        ("a.txt", {"a.txt": ""}, {}, "a.txt', train: expected text, found none in 1 documents: no token would be left"),
        ("", {"a.txt": "\n", "b.txt": ""}, {}, "expected text, found none in 2 documents"),
        (
            "",
            {},
            {},
            f"expected txt files or a train file ({', '.join(f'train{each}' for each in ENDINGS)}, each also with .gz)",
        ),
        ("", {"a.md": "a"}, {}, "found a.md: there would be nothing to train on"),
        ("", {"a.txt": "a", "my.csv": "text\na\n"}, {}, "expected a train file"),
        ("", {"test.txt": "a"}, {}, "expected a split 'train', found test"),
        ("a.txt", {"a.txt": "a"}, {"split": "test"}, "expected a split 'test', found train: nothing would be read"),
        ("a.txt", {"a.txt": "a"}, {"column": "body"}, "with a column 'body', found txt files, which have no columns"),
        ("a.csv", {"a.csv": "text,n\n,1\n"}, {}, "a.csv', train: expected text, found none in 1 documents"),
        ("a.csv", {"a.csv": "question,n\nq,1\n"}, {}, "no text column: expected one of text, found question, n"),
        ("a.csv", {"a.csv": "body,n\nq,1\n"}, {"column": "bodi"}, "no column 'bodi'"),
        ("a.csv", {"a.csv": "body,n\nq,1\n"}, {"column": "bodi"}, "did you mean 'body'?"),
        (
            "a.csv",
            {"a.csv": "text,text\nq,1\n"},
            {},
            "a.csv': expected columns of different names, found 'text' as the name of columns 1 and 2",
        ),
    ],
)
def test_a_path_without_the_requested_text_is_rejected_and_named(tmp_path, name, files, settings, named):
    path = write(tmp_path, files) / name
    message = rejection(read_texts, str(path), **settings)
    assert named in message
    assert str(tmp_path) in message


def test_a_column_without_text_is_rejected(tmp_path):
    pq.write_table(pa.table({"text": [["a", "b"]], "none": pa.nulls(1)}), tmp_path / "a.parquet")
    message = rejection(read_texts, str(tmp_path / "a.parquet"))
    assert "column 'text': expected text, found list<" in message
    assert message.endswith("the model would learn the written form of such values")
    assert "found none in 1 documents" in rejection(read_texts, str(tmp_path / "a.parquet"), "none")
    assert "no path is set" in rejection(read_texts, "")


# --- blocks


@pytest.mark.parametrize("length", [2, 3, 7, 64, 10_000])
def test_blocks_of_a_decoder_join_to_the_token_stream(length):
    tokenizer = decoder_tokenizer(eos_token="<eos>")
    texts = TEXTS * (TEXTS_AT_ONCE // len(TEXTS) + 1)
    stream = [i for text in texts for i in [*tokenizer.encode(text, add_special_tokens=False), 1]]
    blocks = token_blocks(tokenizer, texts, length)
    assert {block.dtype for block in blocks} == {np.dtype(np.int64)}
    assert {len(block) for block in blocks[:-1]} <= {length}
    assert 2 <= len(blocks[-1]) <= length
    token_count = len(stream) - (len(stream) % length == 1)
    assert np.concatenate(blocks).tolist() == stream[:token_count]


@pytest.mark.parametrize("length", [4, 9, 64])
def test_framed_blocks_of_an_encoder_join_to_the_token_stream(tokenizer, length):
    stream = [i for text in TEXTS for i in [*tokenizer.encode(text, add_special_tokens=False), 3]]
    blocks = token_blocks(tokenizer, TEXTS, length)
    assert {len(block) for block in blocks[:-1]} == {length}
    assert 4 <= len(blocks[-1]) <= length
    assert {(block[0], block[-1]) for block in blocks} == {(2, 3)}
    token_count = len(stream) - (len(stream) % (length - 2) == 1)
    assert np.concatenate([block[1:-1] for block in blocks]).tolist() == stream[:token_count]


def test_a_single_left_over_token_makes_no_block():
    tokenizer = decoder_tokenizer(eos_token="<eos>")
    words = " ".join(FILLERS[:8])
    assert [len(block) for block in token_blocks(tokenizer, [words], 4)] == [4, 4]
    assert [len(block) for block in token_blocks(tokenizer, [words + " " + FILLERS[0]], 4)] == [4, 4, 2]
    assert token_blocks(tokenizer, [], 4) == []
    assert token_blocks(tokenizer, [""], 4) == []


def test_sep_ends_a_text_even_if_there_is_an_eos():
    both = decoder_tokenizer(eos_token="<eos>", sep_token=FILLERS[0])
    assert token_blocks(both, [FILLERS[1]], 4)[0].tolist() == [3, 1]


def test_too_short_blocks_and_a_tokenizer_without_an_end_token_are_rejected(tokenizer):
    message = "length: expected at least {} tokens a block, found {}: there would be no next token to predict"
    assert rejection(token_blocks, tokenizer, TEXTS, 3) == message.format(4, 3)
    assert rejection(token_blocks, decoder_tokenizer(eos_token="<eos>"), TEXTS, 1) == message.format(2, 1)
    assert rejection(token_blocks, decoder_tokenizer(), TEXTS, 8) == (
        "tokenizer: expected an eos or a sep token, found neither: the end of one text and the start of the next would "
        "be learned as one sentence"
    )


def test_each_label_is_the_next_token():
    rows = [np.array([5, 6, 7, 8]), np.array([9, 10]), np.array([11, 12, 13])]
    batch = LanguageBlocks(rows).collate(np.array([2, 0, 1]), 99)
    assert {name: value.dtype for name, value in batch.items()} == dict.fromkeys(batch, torch.int64)
    assert batch["input_ids"].tolist() == [[11, 12, 13, 99], [5, 6, 7, 8], [9, 10, 99, 99]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]]
    none = IGNORED
    assert batch["labels"].tolist() == [[12, 13, none, none], [6, 7, 8, none], [10, none, none, none]]


def test_batches_contain_every_block_once():
    blocks = LanguageBlocks(token_blocks(decoder_tokenizer(eos_token="<eos>"), TEXTS, 16))
    assert blocks.lengths.tolist() == [len(row) for row in blocks.input_ids]
    wanted = sorted(row.tolist() for row in blocks.input_ids)
    for batches in (TrainBatches(blocks, 4, 0, seed=1), EvalBatches(blocks, 4, 0)):
        rows = [(b["input_ids"][i], b["attention_mask"][i].bool()) for b in batches for i in range(len(b["labels"]))]
        assert sorted(ids[mask].tolist() for ids, mask in rows) == wanted


# --- masks


def test_a_mask_is_independent_of_the_batch_and_the_order(tokenizer):
    data = masked_blocks(tokenizer)
    alone = [data.collate([i], 0, 1) for i in range(len(data))]
    for order in (range(12), reversed(range(12)), [3, 11, 0]):
        rows = list(order)
        batch = data.collate(np.array(rows), 0, 1)
        for index, row in enumerate(rows):
            length = data.lengths[row]
            for name, value in batch.items():
                assert torch.equal(value[index, :length], alone[row][name][0]), name


@pytest.mark.slow
def test_a_mask_is_the_same_in_another_process():
    rows = samples(5, 20)
    code = (
        "import json, sys\nimport numpy as np\nfrom distill.data.masking.masks import MaskConfig, mask_tokens\n"
        "np.random.seed(7)\nrows, facts = json.load(sys.stdin)\n"
        "masked = [mask_tokens(np.array(row, np.int32), 2, MaskConfig(seed=3), **facts) for row in reversed(rows)]\n"
        "print(json.dumps([[ids.tolist(), positions.tolist()] for ids, positions in reversed(masked)]))"
    )
    sent = json.dumps([[row.tolist() for row in rows], FACTS])
    other = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, text=True, check=True)
    local = [mask_tokens(row, 2, MaskConfig(seed=3), **FACTS) for row in rows]
    assert json.loads(other.stdout) == [[ids.tolist(), positions.tolist()] for ids, positions in local]


def test_masks_equal_those_of_the_first_version():
    """Caches on disk outlive the code, so masks must not change between versions."""
    ids = np.arange(5, 45)
    masked_ids, positions = mask_tokens(ids, 1, MaskConfig(rate=0.3, replaced=0.4, random=0.4, seed=11), **FACTS)
    assert np.flatnonzero(positions).tolist() == [0, 9, 13, 16, 17, 25, 27, 33, 35, 38]
    assert masked_ids[positions].tolist() == [5, 64, 18, 4, 22, 4, 33, 4, 40, 4]


def test_masks_differ_between_passes_and_then_repeat():
    config, rows = MaskConfig(passes=3), samples(20)
    for row in rows:
        masked = [mask_tokens(row, epoch, config, **FACTS) for epoch in range(7)]
        assert len({positions.tobytes() for _, positions in masked}) == 3
        for epoch in range(4):
            assert all(np.array_equal(a, b) for a, b in zip(masked[epoch], masked[epoch + 3], strict=True))
        other = mask_tokens(row, 0, MaskConfig(passes=3, seed=1), **FACTS)
        assert not np.array_equal(other[1], masked[0][1])


def test_shares_of_masked_and_replaced_tokens_match_the_config():
    config, rows = MaskConfig(rate=0.2, replaced=0.5, random=0.3), samples(2000)
    masked = [mask_tokens(row, 0, config, **FACTS) for row in rows]
    ids, masked_ids = np.stack(rows), np.stack([a for a, _ in masked])
    positions = np.stack([b for _, b in masked])
    maskable = ~np.isin(ids, SPECIALS)
    count = positions.sum()
    assert count / maskable.sum() == pytest.approx(0.2, abs=0.005)
    assert (masked_ids[positions] == 4).mean() == pytest.approx(0.5, abs=0.015)
    same = 0.2 + 0.3 / (len(VOCABULARY) - len(SPECIALS))  # a random token can be the original one
    assert (masked_ids[positions] == ids[positions]).mean() == pytest.approx(same, abs=0.015)
    assert np.array_equal(masked_ids[~positions], ids[~positions])
    by_position = positions[:, maskable.all(0)].mean(0)
    assert np.abs(by_position - 0.2).max() < 0.04, "a place in the sample is chosen more often than another"


def test_special_tokens_are_neither_masked_nor_drawn():
    config, rows = MaskConfig(rate=0.5, replaced=0.0, random=1.0), samples(1500)
    special = (0, 1, 2, 3, 50, len(VOCABULARY) - 1, len(VOCABULARY) + 7)
    drawn: Counter[int] = Counter()
    for row in rows:
        masked_ids, positions = mask_tokens(row, 0, config, mask_id=4, vocabulary=len(VOCABULARY), special_ids=special)
        assert not positions[np.isin(row, (*special, 4))].any()
        drawn.update(masked_ids[positions].tolist())
    assert set(drawn) == set(range(len(VOCABULARY))) - {*special, 4}
    mean = sum(drawn.values()) / len(drawn)
    assert max(abs(count - mean) for count in drawn.values()) < 6 * mean**0.5, "some ids are drawn more often"


def test_ranks_are_mapped_to_the_ordinary_ids_in_order():
    for special in ([0], [0, 1, 2], [2, 3, 9], [9], [0, 4, 5, 9]):
        wanted = [i for i in range(10) if i not in special]
        assert to_regular_ids(np.arange(len(wanted), dtype=np.uint64), 10, np.array(special)).tolist() == wanted


@pytest.mark.parametrize(("ids", "chosen"), [([2, 9, 3], 1), ([2, 9, 8, 3], 1), ([2, 3], 0), ([], 0)])
def test_at_least_one_ordinary_token_is_masked_if_there_is_one(ids, chosen):
    config = MaskConfig(rate=1e-9)
    places = set()
    for epoch in range(4):
        ids = np.array(ids, np.int64)
        before = ids.copy()
        masked_ids, positions = mask_tokens(ids, epoch, config, **FACTS)
        assert positions.sum() == chosen
        assert (len(masked_ids), positions.dtype, masked_ids.dtype) == (len(ids), bool, np.int64)
        assert np.array_equal(ids, before), "the sample itself was changed"
        places |= set(np.flatnonzero(positions).tolist())
    assert places <= set(range(1, len(ids) - 1))


def test_fields_of_a_masked_batch_are_aligned(tokenizer):
    data = masked_blocks(tokenizer, rate=0.4)
    assert (data.mask_id, data.vocabulary, sorted(data.special_ids)) == (4, len(VOCABULARY), list(SPECIALS))
    assert len(data) == 12
    batch, plain = data.collate(range(12), 77, 0), data.blocks.collate(range(12), 77)
    assert {name: value.dtype for name, value in batch.items()} == {
        "input_ids": torch.int64,
        "attention_mask": torch.int64,
        "positions": torch.bool,
        "labels": torch.int64,
    }
    positions = batch["positions"]
    assert torch.equal(batch["attention_mask"], plain["attention_mask"])
    assert not positions[batch["attention_mask"] == 0].any()
    assert torch.equal(batch["labels"], plain["input_ids"].masked_fill(~positions, IGNORED))
    assert torch.equal(batch["input_ids"][~positions], plain["input_ids"][~positions])
    assert (batch["input_ids"][positions] == 4).float().mean() > 0.5


def test_a_tokenizer_without_a_mask_token_is_rejected():
    blocks = LanguageBlocks([np.arange(4)])
    assert rejection(MaskedBlocks.build, blocks, MaskConfig(), decoder_tokenizer(eos_token="<eos>")) == (
        "tokenizer: expected a mask token, found none: no token could be masked; "
        "the tokenizer is not one of a masked language model"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rate": 0.0},
            "masking.rate: expected a share between 0 and 1, found 0.0: no token would be masked",
        ),
        ({"rate": 1.0}, "masking.rate: expected a share between 0 and 1, found 1.0"),
        ({"rate": float("nan")}, "masking.rate: expected a share between 0 and 1, found nan"),
        ({"replaced": -0.1}, "masking.replaced: expected a share from 0 to 1, found -0.1"),
        ({"random": 1.1}, "masking.random: expected a share from 0 to 1, found 1.1"),
        ({"random": 0.3}, "expected at most 1, found 1.1: fewer tokens would be random than requested"),
        ({"seed": -1}, "masking.seed: expected 0 to 2**63 - 1, found -1: it would not fit the hash"),
        ({"seed": 2**63}, "masking.seed: expected 0 to 2**63 - 1, found 9223372036854775808"),
        ({"passes": 0}, "masking.passes: expected at least 1, found 0: no epoch would have a mask"),
    ],
)
def test_an_invalid_mask_config_is_rejected(changes, message):
    assert message in rejection(MaskConfig, **changes)


@pytest.mark.parametrize(
    ("epoch", "changes", "message"),
    [
        (-1, {}, "epoch: expected 0 or more, found -1: no epoch of a training uses its mask"),
        (0, {"mask_id": 300}, "mask id: expected an id from 0 to 9, found 300: the model has no embedding for it"),
        (0, {"mask_id": -1}, "mask id: expected an id from 0 to 9, found -1"),
        (0, {"special_ids": range(10)}, "masking.random: expected ids to draw from, found 10 ids, all special"),
    ],
)
def test_invalid_epochs_and_ids_are_rejected(epoch, changes, message):
    facts = {"mask_id": 4, "vocabulary": 10, "special_ids": [0, 1]} | changes
    assert message in rejection(mask_tokens, np.arange(10), epoch, MaskConfig(), **facts)
    if "random" in message:
        assert not mask_tokens(np.arange(10), epoch, MaskConfig(random=0.0), **facts)[1].any()
