"""Unlabelled text for the students of a data set of sentences: lines of other data sets' texts.

    python -m benchmarks.students.sentences --data reviews/ --count 25000 --output sentences.csv
    python -m benchmarks.students.sentences --data comments/ tweets/ --split_words --output sentences_of_words.csv

The sentences are different lines of the training texts, drawn by the seed, with a number of words in a range. The file
is a table with a column `text`, for `python -m pipelines.distill --data.unlabelled`. With `--split_words`, spaces
separate words from punctuation, as in sentences whose words have tags.
"""

import argparse
import csv
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from benchmarks.common.tables import read_table

# Contractions are split as in the Penn Treebank: "do n't", "I 'm".
WORD = re.compile(r"https?://\S+|\w+?(?=n't\b)|n't\b|'(?:s|m|d|re|ve|ll)\b|\w+|[^\w\s]", re.IGNORECASE)


def main() -> None:
    """Draws the sentences and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="folders of tables train.* with a `text`")
    parser.add_argument("--count", type=int, default=25_000)
    parser.add_argument("--words", type=int, nargs=2, default=(3, 60), help="fewest and most words of a sentence")
    parser.add_argument("--split_words", action="store_true", help="separate words and punctuation by spaces")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    texts = (str(row["text"]) for folder in options.data for row in read_table(folder, "train"))
    if options.split_words:
        texts = (split_words(text) for text in texts)
    sentences = draw_sentences(texts, options.count, options.words, options.seed)
    with options.output.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["text"], *([sentence] for sentence in sentences)])
    print(f"{len(sentences):,} sentences in {options.output}")


def draw_sentences(texts: Iterable[str], count: int, words: tuple[int, int], seed: int) -> list[str]:
    """Returns different lines of the texts whose number of words is in a range, ends included, in random order."""
    lines = dict.fromkeys(line.strip() for text in texts for line in text.splitlines())
    fitting = [line for line in lines if words[0] <= len(line.split()) <= words[1]]
    return [fitting[number] for number in np.random.default_rng(seed).permutation(len(fitting))[:count]]


def split_words(text: str) -> str:
    """Returns a text with spaces between its words and punctuation marks, line by line."""
    return "\n".join(" ".join(WORD.findall(line)) for line in text.splitlines())


if __name__ == "__main__":
    main()
