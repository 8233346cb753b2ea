"""Makes sentences as lists of words from an encyclopaedia, for a tagger to label and its student to be trained on.

    python -m benchmarks.tasks.tagger_sentences --data wikipedia_en/ --output runs/words.parquet
    python -m benchmarks.tasks.gain --task token-classification --unlabelled runs/words.parquet ...

Each article gives at most one sentence, of 6 to 30 words, with a capitalized word after the first: one that may contain
a name. Punctuation marks are words of their own, as in the data that taggers are trained on. Printed are the numbers of
sentences and words.
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
SENTENCE_WORDS = (6, 30)  # fewest and most words of a sentence


def main() -> None:
    """Writes the sentences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="plain text, as read by distill.data.sources.text_files")
    parser.add_argument("--rows", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="runs/words.parquet")
    options = parser.parse_args()
    texts, rng = read_texts(options.data), random.Random(options.seed)  # noqa: S311 - reproducible, no secret
    rng.shuffle(texts)
    rows = list(islice(pick_sentences(texts, rng), options.rows))
    if len(rows) < options.rows:
        raise SystemExit(
            f"--data {options.data}: expected {options.rows} sentences with names, found {len(rows)}: pass fewer --rows"
        )
    file = Path(options.output)
    file.parent.mkdir(parents=True, exist_ok=True)
    pa.parquet.write_table(pa.table({"tokens": rows}), file)
    Console().say(f"{file}: {len(rows)} sentences, {sum(map(len, rows))} words")


def pick_sentences(texts: list[str], rng: random.Random) -> Iterator[list[str]]:
    """Yields the words of one sentence of each text that has a suitable one."""
    for text in texts:
        sentences = (WORD.findall(sentence.group()) for sentence in SENTENCE.finditer(text))
        suitable = [words for words in sentences if may_contain_name(words)]
        if suitable:
            yield rng.choice(suitable)


def may_contain_name(words: list[str]) -> bool:
    """Returns whether a sentence has a suitable length and a capitalized word after the first."""
    least, most = SENTENCE_WORDS
    return least <= len(words) <= most and any(word[0].isupper() for word in words[1:])


if __name__ == "__main__":
    main()
