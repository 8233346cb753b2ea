"""Sentences of an encyclopaedia as lists of words, for a tagger to label and its student to learn from.

    python -m benchmarks.words --data wikipedia_en/ --output runs/words.parquet
    python -m benchmarks.tasks --task token-classification --unlabelled runs/words.parquet ...

At most one sentence an article, with a capital after its first word: one that may name something. Marks are words of
their own, as in the data that taggers learn from.
"""

import argparse
import random
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

from distill.data.sources.text_files import read_texts
from pipelines.runs.console import Console

SENTENCE = re.compile(r"[^.!?\n]+[.!?]")
WORD = re.compile(r"\w+(?:['’]\w+)?|[^\w\s]")
WORDS = (6, 30)  # of a sentence


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="what distill.data.sources.text_files.read_texts reads")
    parser.add_argument("--rows", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="runs/words.parquet")
    given = parser.parse_args()
    texts, rng = read_texts(given.data), random.Random(given.seed)
    rng.shuffle(texts)
    rows = list(islice(sentences(texts, rng), given.rows))
    if len(rows) < given.rows:
        raise SystemExit(f"{given.data}: expected {given.rows} sentences with names, found {len(rows)}")
    file = Path(given.output)
    file.parent.mkdir(parents=True, exist_ok=True)
    pa.parquet.write_table(pa.table({"tokens": rows}), file)
    Console().say(f"{file}: {len(rows)} sentences, {sum(map(len, rows))} words")


def sentences(texts: list[str], rng: random.Random) -> Iterator[list[str]]:
    """The words of one sentence a text that has any."""
    for text in texts:
        found = [words for each in SENTENCE.finditer(text) if may_name(words := WORD.findall(each.group()))]
        if found:
            yield rng.choice(found)


def may_name(words: list[str]) -> bool:
    return WORDS[0] <= len(words) <= WORDS[1] and any(word[0].isupper() for word in words[1:])


if __name__ == "__main__":
    main()
