"""One student under each of two teachers, and under both: do two teach better than the better one of them?

    python -m benchmarks.two_teachers --data examples/data/banking77 --output runs/two-teachers

Two teachers are fine-tuned with other seeds; the one whose students are better is the one to beat. For each seed the
same student is distilled by `pipelines.distill` from the first, from the second, and from both as one checkpoint, and
scored on the whole test split, as are the teachers, each alone and mixed: what the mixture gains is there to be learnt.
What is finished is skipped when the same command runs again, or one with more seeds; words that aren't its own go to
`pipelines.distill`.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoModelForSequenceClassification

from benchmarks.command import command
from benchmarks.kept import keep_to, only_checkpoint
from distill.checkpoint.tokenizer import load_tokenizer
from distill.data.config import DataConfig
from distill.data.splits.labelled import load_splits
from distill.tasks.text_classification import TextClassification
from distill.teacher.ensemble import register
from pipelines.runs.console import Console
from pipelines.stages.scoring import compute_outputs

MAX_LENGTH = 128
WAYS = ("first", "second", "both")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/demo.yaml")
    parser.add_argument("--data", default="examples/data/banking77")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--teachers", nargs=2, type=int, default=[100, 101], help="their seeds")
    parser.add_argument("--mix", choices=["weighted", "confidence"], default="weighted")
    parser.add_argument("--output", default="runs/two-teachers")
    given, more = parser.parse_known_args()
    given.more = more
    console = Console()
    register()  # so that the mixture of both loads like any checkpoint
    keep_to(Path(given.output), given, free=("seeds",))
    teachers = [teacher(given, seed) for seed in given.teachers]
    scores = {f"teacher {i + 1}": [score(given, each)] for i, each in enumerate(teachers)}
    for way in WAYS:
        scores[way] = [score(given, student(given, way, teachers, seed)) for seed in given.seeds]
        console.say(f"{way}: {told(scores[way])}")
    mixed = only_checkpoint(Path(given.output) / f"both-{given.seeds[0]}", "ensemble")
    scores["both teachers, mixed"] = [score(given, mixed)]
    rows = [(name, told(values), ", ".join(f"{value:.2%}" for value in values)) for name, values in scores.items()]
    console.table(f"{Path(given.data).name}, test accuracy", ("taught by", "mean", "each seed"), rows)
    better = max(WAYS[:2], key=lambda way: statistics.mean(scores[way]))
    gains = [both - one for both, one in zip(scores["both"], scores[better], strict=True)]
    console.say(f"both against {better}, seed by seed: {', '.join(f'{gain * 100:+.2f}' for gain in gains)} points")


def run(given: argparse.Namespace, output: Path, *words: str) -> None:
    command("distill", "--config", given.config, "--data", given.data, "--output", str(output), *words)


def teacher(given: argparse.Namespace, seed: int) -> Path:
    output = Path(given.output) / f"teacher-{seed}"
    run(given, output, "--seed", str(seed), "--until", "teacher", *given.more)
    return only_checkpoint(output, "teacher")


def student(given: argparse.Namespace, way: str, teachers: Sequence[Path], seed: int) -> Path:
    """The trained student's checkpoint."""
    output = Path(given.output) / f"{way}-{seed}"
    first = teachers[way == "second"]
    words = ["--teacher", str(first), "--seed", str(seed), "--until", "distill", *given.more]
    if way == "both":
        words += ["--teacher.also", json.dumps([str(teachers[1])]), "--teacher.mix", given.mix]
    run(given, output, *words)
    return only_checkpoint(output, "distill")


def score(given: argparse.Namespace, folder: Path) -> float:
    """Accuracy on the test split."""
    splits, tokenizer = load_splits(DataConfig(path=given.data)), load_tokenizer(folder)
    task = TextClassification(splits.labels)
    test = task.encode(tokenizer, splits.test, MAX_LENGTH)
    model = AutoModelForSequenceClassification.from_pretrained(folder, use_safetensors=True)
    return compute_outputs(model, test, int(tokenizer.pad_token_id or 0), task).score


def told(values: Sequence[float]) -> str:
    text = f"{statistics.mean(values):.2%}"
    return f"{text} ± {statistics.stdev(values) * 100:.2f}" if len(values) > 1 else text


if __name__ == "__main__":
    main()
