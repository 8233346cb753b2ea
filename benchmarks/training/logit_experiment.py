"""A classifier as teacher and its data, for benchmarks that train students on its logits."""

from functools import partial
from pathlib import Path

from transformers import PreTrainedModel

from benchmarks.pruning.sparse_runtimes import compute_logits
from benchmarks.training.logit_training import compute_all_logits
from distill.checkpoint.tokenizer import load_tokenizer
from distill.data.batches.encode import Encoded, encode_samples
from distill.data.config import DataConfig
from distill.data.splits.labelled import load_splits
from distill.tasks.text_classification import TextClassification
from distill.teacher.fingerprint import freeze

MAX_LENGTH = 128


class LogitExperiment:
    """The teacher, its tokenizer, and the splits with their token ids; a tenth of train is the validation split.

    Args:
        teacher: Folder of a classifier that was trained on the data.
        data: The data set.

    Raises:
        SystemExit: The classifier has other labels.
    """

    def __init__(self, teacher: str, data: str):
        self.source, self.tokenizer = Path(teacher), load_tokenizer(Path(teacher))
        self.splits = load_splits(DataConfig(path=data, max_length=MAX_LENGTH, validation_fraction=0.1))
        task = TextClassification(self.splits.labels)
        rows = task.head_rows(task.config(teacher))
        if rows is None:
            raise SystemExit(f"--teacher {teacher}: expected a head for the labels of the data, found none")
        self.teacher = freeze(task.load_with_head(teacher, rows))
        self.train, self.validation, self.test = (
            encode_samples(self.tokenizer, part, MAX_LENGTH)
            for part in (self.splits.train, self.splits.validation, self.splits.test)
        )
        self.pad_id = int(self.tokenizer.pad_token_id or 0)

    def measure_accuracy(self, model: PreTrainedModel, data: Encoded) -> float:
        """Returns a model's accuracy on a split."""
        logits = compute_all_logits(partial(compute_logits, model), data, self.pad_id)
        return float((logits.argmax(-1) == data.labels).mean())
