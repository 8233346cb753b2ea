"""A classifier as teacher and its data, for benchmarks that train students on its logits."""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel

from benchmarks.pruning.sparse_runtimes import compute_logits
from benchmarks.training.logit_training import compute_all_logits, load_targets, take_steps
from compress.sparsity.training import SparseTraining, convert_sparse
from distill.checkpoint.tokenizer import load_tokenizer
from distill.data.batches.encode import Encoded, encode_samples
from distill.data.batches.packing import find_padding_id
from distill.data.config import DataConfig
from distill.data.splits.labelled import load_splits
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
    parser.add_argument("--epochs", type=int, default=epochs)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=10, help="timed calls")
    parser.add_argument("--threads", type=int, default=1)
    return parser


class LogitExperiment:
    """The teacher, its tokenizer, and the splits with their token ids.

    Args:
        teacher: Folder of a classifier that was trained on the data.
        data: The data set.
        validation_fraction: Share of train that is the validation split, if the data set has none.

    Raises:
        SystemExit: The classifier has other labels.
    """

    def __init__(self, teacher: str, data: str, *, validation_fraction: float = 0.1):
        self.source, self.tokenizer = Path(teacher), load_tokenizer(Path(teacher))
        self.splits = load_splits(DataConfig(path=data, max_length=MAX_LENGTH, validation_fraction=validation_fraction))
        task = TextClassification(self.splits.labels)
        rows = task.head_rows(task.config(teacher))
        if rows is None:
            raise SystemExit(f"--teacher {teacher}: expected a head for the labels of the data, found none")
        self.teacher = freeze(task.load_with_head(teacher, rows))
        self.train, self.validation, self.test = (
            encode_samples(self.tokenizer, part, MAX_LENGTH)
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
            student, optimizer, schedule, self.train, self.pad_id, batches, logits, train.max_grad_norm, label, console,
            sparsity,
        )  # fmt: skip
        if sparsity:
            convert_sparse(sparsity)
        trained: PreTrainedModel = student.eval()
        return trained

    def measure_accuracy(self, model: PreTrainedModel, data: Encoded) -> float:
        """Returns a model's accuracy on a split."""
        logits = compute_all_logits(partial(compute_logits, model), data, self.pad_id)
        return float((logits.argmax(-1) == data.labels).mean())
