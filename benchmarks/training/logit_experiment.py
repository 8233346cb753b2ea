"""A classifier as teacher and its data, for benchmarks that train students on its logits."""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.pruning.sparse_runtimes import compute_logits
from benchmarks.training.logit_training import compute_all_logits, load_targets, take_steps
from compress.sparsity.training import SparseTraining, convert_sparse
from distill.checkpoint.config import load_config
from distill.checkpoint.tokenizer import load_tokenizer
from distill.data.batches.encode import Encoded
from distill.data.batches.packing import find_padding_id
from distill.data.config import DataConfig
from distill.data.splits.examples import Splits
from distill.tasks.choose import TASKS, find_task_of_head
from distill.tasks.text_classification import TextClassification
from distill.teacher.fingerprint import freeze
from distill.train.config import TrainConfig
from distill.train.optimizer import build_optimizer
from distill.train.schedule import build_schedule
from pipelines.runs.console import Console

MAX_LENGTH = 128


def build_parser(about: str | None, epochs: int) -> argparse.ArgumentParser:
    """Returns a parser with the options of every experiment.

    Args:
        about: Description of the benchmark.
        epochs: Epochs of a training, by default.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", required=True, help="folder of a classifier trained on the data")
    parser.add_argument("--data", default="examples/data/banking77")
    parser.add_argument("--label", help="column with the labels, found by its name if omitted")
    parser.add_argument("--max_length", type=int, default=MAX_LENGTH, help="tokens of a text")
    parser.add_argument("--epochs", type=int, default=epochs)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=10, help="timed calls")
    parser.add_argument("--threads", type=int, default=1)
    return parser


def build_data_config(options: argparse.Namespace) -> DataConfig:
    """Returns the data set that the options of `build_parser` name."""
    return DataConfig(path=options.data, label=options.label, max_length=options.max_length)


class LogitExperiment:
    """The teacher, its tokenizer, and the splits with their token ids.

    Args:
        teacher: Folder of a classifier that was trained on the data, with one class or any number of them per text.
        data: The data set, with the maximum length of its texts.

    Raises:
        SystemExit: The classifier has other labels, or isn't a text classifier.
    """

    def __init__(self, teacher: str, data: DataConfig):
        self.source, self.tokenizer = Path(teacher), load_tokenizer(Path(teacher))
        kind = TASKS.get(find_task_of_head(load_config(self.source, "teacher"), teacher))
        if kind is None or not issubclass(kind, TextClassification):
            raise SystemExit(f"--teacher {teacher}: expected a text classifier, found a checkpoint for another task")
        self.splits: Splits = kind.read(data, 0)
        self.task = kind(self.splits.labels)
        rows = self.task.head_rows(self.task.config(teacher))
        if rows is None:
            raise SystemExit(f"--teacher {teacher}: expected a head for the labels of the data, found none")
        self.teacher = freeze(self.task.load_with_head(teacher, rows))
        self.train, self.validation, self.test = (
            self.task.encode(self.tokenizer, part, data.max_length)
            for part in (self.splits.train, self.splits.validation, self.splits.test)
        )
        self.pad_id = find_padding_id(self.tokenizer)

    def fit(
        self,
        student: PreTrainedModel,
        train: TrainConfig,
        batches: Sequence[np.ndarray],
        targets: Path,
        label: str,
        console: Console,
        sparsity: SparseTraining | None = None,
    ) -> PreTrainedModel:
        """Trains a student with AdamW on the KL divergence from the teacher's logits, and returns it in eval mode.

        Args:
            student: The student, in training mode.
            train: Settings of the optimizer and the schedule.
            batches: Numbers of the training rows of each step's batch.
            targets: File with the teacher's logits, written if it is missing.
            label: Name of the training, for the progress bar.
            console: Where it is shown.
            sparsity: Training of the student's zeros; None if it stays dense.
        """
        optimizer = build_optimizer(student, [], train)
        schedule = build_schedule(optimizer, train, len(batches))
        logits = load_targets(targets, self.teacher, self.train, self.pad_id)
        take_steps(
            student, optimizer, schedule, self.train, self.pad_id, batches, logits, self.task.output_rows,
            train.max_grad_norm, label, console, sparsity,
        )  # fmt: skip
        if sparsity:
            convert_sparse(sparsity)
        trained: PreTrainedModel = student.eval()
        return trained

    def measure_score(self, model: PreTrainedModel, data: Encoded) -> float:
        """Returns a model's score on a split."""
        return self.score_logits(compute_all_logits(partial(compute_logits, model), data, self.pad_id), data)

    def score_logits(self, logits: np.ndarray, data: Encoded) -> float:
        """Returns the score of the logits of a split's texts: the accuracy, or the micro F1 with several labels."""
        scorer = self.task.scorer(data)
        scorer.record(np.arange(len(logits)), {}, torch.from_numpy(logits))
        return scorer.scores()[self.task.metric_name]
