"""Cleaning in a tokenizer's own normalizer: the same texts as the steps, and tokens of cleaned texts."""

import json
import random
import re
import sys

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoTokenizer

from distill.data.clean.config import parse_steps
from distill.data.clean.text_steps import build_text_steps
from distill.data.clean.tokenizer_normalizer import add_normalizers, build_normalizers, find_expressible_steps
from support.tiny_models import word_tokenizer


def normalize(steps: str, texts: list[str]) -> list[str]:
    tokenizer = Tokenizer(WordLevel({"a": 0}, "a"))
    content = json.loads(tokenizer.to_str())
    content["normalizer"] = {"type": "Sequence", "normalizers": build_normalizers(parse_steps(steps))}
    normalizer = Tokenizer.from_str(json.dumps(content)).normalizer
    return [normalizer.normalize_str(text) for text in texts]


def clean(steps: str, texts: list[str]) -> list[str]:
    built = build_text_steps(parse_steps(steps))
    cleaned = []
    for text in texts:
        for step in built:
            text = step.change(text)
        cleaned.append(text)
    return cleaned


BLANKS = re.findall(r"\s", "".join(map(chr, range(sys.maxunicode))))


@pytest.mark.parametrize("steps", ["whitespace", "unicode", "unicode=nfkc", "case", "unicode,case,whitespace"])
def test_the_normalizer_does_what_the_steps_do(steps):
    rng = random.Random(0)
    letters = ["a", "B", "é", "e\u0301", "ﬁ", "Å", "İ", "ß", "\u200b", "\u00ad", "\ufeff", " ", " ", "  ", *BLANKS]
    texts = ["".join(rng.choices(letters, k=rng.randint(0, 12))) for _ in range(3000)]
    assert normalize(steps, texts) == clean(steps, texts)


def test_only_the_last_steps_are_expressed():
    assert [step.name for step in find_expressible_steps(parse_steps("html,unicode,case,whitespace"))] == [
        "unicode",
        "case",
        "whitespace",
    ]
    assert [step.name for step in find_expressible_steps(parse_steps("unicode,urls,whitespace"))] == ["whitespace"]
    assert find_expressible_steps(parse_steps("unicode,whitespace=lines")) == ()


def test_a_stock_tokenizer_cleans_and_a_linked_file_stays(tmp_path):
    word_tokenizer(do_lower_case=False).save_pretrained(tmp_path / "stage")
    (tmp_path / "published").mkdir()
    for file in (tmp_path / "stage").iterdir():
        (tmp_path / "published" / file.name).hardlink_to(file)
    before = (tmp_path / "stage" / "tokenizer.json").read_text()
    assert add_normalizers(tmp_path / "published", parse_steps("unicode,case"))
    assert (tmp_path / "stage" / "tokenizer.json").read_text() == before
    plain, published = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("stage", "published"))
    assert published("baka dele.", "dele") == plain("baka dele.", "dele")
    assert published.tokenize("BAKA Dele") == plain.tokenize("baka dele") != plain.tokenize("BAKA Dele")
    assert not add_normalizers(tmp_path / "published", parse_steps("html"))
    assert not add_normalizers(tmp_path / "nowhere", parse_steps("unicode"))
