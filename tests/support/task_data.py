"""Small data sets that tiny models can learn, for other tasks than single-label classification."""

import csv
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from support.tiny_models import CLUES, FILLERS, LABELS, WORDS, make_rows

TAGS = ["O", *(f"B-{label}" for label in LABELS)]
FIRST = [words[0] for words in CLUES.values()]
WORD_PAIRS = dict(zip(WORDS[::2], WORDS[1::2], strict=False))


def tagged_data(folder: Path) -> Path:
    """Writes sentences in which every clue word is a span of its class."""
    label_of_word = {word: label for label, words in CLUES.items() for word in words}
    folder.mkdir()
    for split, count, seed in (("train", 120, 1), ("test", 40, 2)):
        rng = random.Random(seed)
        words = [
            rng.choices([*label_of_word, *label_of_word, *FILLERS[:50]], k=rng.randint(3, 9)) for _ in range(count)
        ]
        tags = [[f"B-{label_of_word[word]}" if word in label_of_word else "O" for word in row] for row in words]
        pa.parquet.write_table(pa.table({"tokens": words, "tags": tags}), folder / f"{split}.parquet")
    return folder


def labelled_data(folder: Path, label_of: Callable[[str, str], Any]) -> Path:
    """Writes texts with labels that are computed from the text and its class."""
    folder.mkdir()
    for split, count, seed in (("train", 120, 1), ("test", 40, 2)):
        rows = make_rows(count, seed)
        labels = [label_of(text, label) for text, label in rows]
        table = pa.table({"text": [text for text, _ in rows], "label": pa.array(labels)})
        pa.parquet.write_table(table, folder / f"{split}.parquet")
    return folder


def multi_label_data(folder: Path) -> Path:
    return labelled_data(folder, lambda text, label: [label, *(["long"] if len(text) > 40 else [])])


def regression_data(folder: Path) -> Path:
    return labelled_data(folder, lambda text, label: LABELS.index(label) + 0.25)


def question_data(folder: Path) -> Path:
    """Writes contexts with one marked word, which is the question; the answer is the next word."""
    rng = random.Random(0)
    folder.mkdir()
    for split, count in (("train", 240), ("validation", 30), ("test", 40)):
        rows = []
        for _ in range(count):
            words, mark = rng.choices(FILLERS[:20], k=9), rng.choice(FIRST)
            position = rng.randrange(8)
            words[position] = mark
            start = len(" ".join(words[: position + 1])) + 1
            answer = {"text": [words[position + 1]], "answer_start": [start]}
            rows.append({"question": mark, "context": " ".join(words), "answers": answer})
        pa.parquet.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")
    return folder


def pair_data(folder: Path) -> Path:
    """Writes pairs scored by the share of words that they have in common."""
    rng = random.Random(0)
    folder.mkdir()
    for split, count in (("train", 80), ("validation", 20), ("test", 30)):
        with (folder / f"{split}.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["sentence1", "sentence2", "score"])
            for _ in range(count):
                words = rng.sample(FILLERS[:60], 10)
                same = rng.randint(0, 5)
                rows.writerow([" ".join(words[:5]), " ".join(words[5 - same : 10 - same]), same / 5 * 4.9 + 0.05])
    return folder


def books_data(folder: Path) -> Path:
    folder.mkdir()
    for number in range(6):
        (folder / f"book{number}.txt").write_text(prose(40, number))
    return folder


def prose(lines: int, seed: int) -> str:
    """Returns lines in which every second word is determined by the previous one."""
    rng, text = random.Random(seed), []
    for _ in range(lines):
        firsts = rng.choices([*WORD_PAIRS][:4], k=6)
        text.append(" ".join(f"{first} {WORD_PAIRS[first]}" for first in firsts) + " .")
    return "\n".join(text)
