"""Text classification: single-label, multi-label and regression, for a text or a pair of texts."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torchmetrics.classification import MulticlassF1Score
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from distill.checkpoint.tokenizer import set_padding_id
from distill.data.batches.encode import Encoded, encode_samples
from distill.data.config import DataConfig
from distill.data.splits.examples import Examples, Splits
from distill.data.splits.labelled import load_all_texts, load_labelled, load_numbers, load_splits
from distill.losses.logits import IGNORED
from distill.tasks.baseline import Baseline, repeat_for_rows
from distill.tasks.correlation import pearson, spearman
from distill.tasks.logit_rows import LabelRows, OutputRows
from distill.tasks.scorer import InsideF1, RowAccuracy, Scorer, concatenate_state
from distill.tasks.task import Problem, Task, check_head, label_name, output_layer

__all__ = ["HEAD", "Regression", "MultiLabel", "TextClassification", "check_classifier", "output_layer", "label_name"]
HEAD = "ForSequenceClassification"
NEAR_IGNORED = np.nextafter(np.float32(IGNORED), np.float32(0))


@dataclass(frozen=True)
class TextClassification(Task):
    """Single-label classification of a text or a pair of texts."""

    name: ClassVar[str] = "text-classification"
    head: ClassVar[str] = HEAD
    metric_name: ClassVar[str] = "accuracy"
    problem: ClassVar[Problem | None] = "single_label_classification"

    @classmethod
    def read(cls, config: DataConfig, seed: int) -> Splits:
        """Loads texts with a class each; see `load_splits`."""
        return load_splits(config, seed)

    @classmethod
    def read_unlabelled(cls, config: DataConfig) -> Examples:
        """Loads every training text, and the unlabelled ones."""
        return load_all_texts(config)

    def complete_config(self, config: PretrainedConfig, folder: Path) -> None:
        """Sets a decoder's padding id to its tokenizer's; see `set_padding_id`."""
        set_padding_id(config, folder)

    def encode(self, tokenizer: PreTrainedTokenizerBase, part: Examples, max_length: int) -> Encoded:
        """Returns one row of token ids for each text or pair of texts."""
        return encode_samples(tokenizer, part, max_length)

    def scorer(self, rows: Encoded | None = None) -> Scorer:
        """Returns the scorer of classes."""
        return ClassScorer(rows)

    def baseline(self, train: Examples) -> Baseline | None:
        """Returns the baseline that predicts the most frequent class."""
        counts = np.bincount(train.labels, minlength=len(self.labels))
        majority = int(counts.argmax())
        description = f"the class {self.labels[majority]!r}, the most frequent in train"
        return Baseline("majority class", description, repeat_for_rows(np.eye(len(counts))[majority]))


class ClassScorer(RowAccuracy):
    """Accuracy and, of the recorded samples, macro F1."""

    def __init__(self, rows: Encoded | None = None):
        super().__init__()
        self.labels = rows.labels if rows is not None else np.zeros(0, np.int64)
        self.predictions = np.full(len(self.labels), -1, np.int64)
        self.classes = 0

    def record(self, rows: np.ndarray, batch: dict[str, Tensor], logits: Tensor) -> None:
        """Adds samples; logits [batch, classes]."""
        self.classes = logits.shape[-1]
        self.predictions[rows] = logits.argmax(-1).numpy()
        self.update(logits, torch.from_numpy(self.labels[rows]))

    def scores(self) -> dict[str, float]:
        """Returns the accuracy and the macro F1 of the recorded samples."""
        f1 = MulticlassF1Score(num_classes=self.classes, average="macro")
        macro = float(f1(torch.from_numpy(self.predictions), torch.from_numpy(self.labels)))
        return {"accuracy": self.accuracy(), "macro F1": macro}

    def decisions(self) -> np.ndarray:
        """Returns the predicted class of each sample, int64 [samples]."""
        return self.predictions


def check_classifier(config: PretrainedConfig, path: str) -> None:
    """Checks that the checkpoint at `path` is a text classifier or a pre-trained body.

    Raises:
        InputError: It was trained for another task.
    """
    check_head(config, path, HEAD, TextClassification.name)


@dataclass(frozen=True)
class MultiLabel(TextClassification):
    """Multi-label classification: any number of classes per text."""

    name: ClassVar[str] = "multi-label"
    metric_name: ClassVar[str] = "micro F1"
    problem: ClassVar[Problem | None] = "multi_label_classification"
    output_rows: ClassVar[OutputRows] = LabelRows()

    @classmethod
    def read(cls, config: DataConfig, seed: int) -> Splits:
        """Loads texts with any number of labels each; see `load_labelled`."""
        return load_labelled(config, seed)

    def scorer(self, rows: Encoded | None = None) -> Scorer:
        """Returns the scorer of labels."""
        return LabelScorer(rows)

    def baseline(self, train: Examples) -> Baseline | None:
        """Returns the baseline that predicts the most frequent label alone."""
        majority = int(np.sum(train.labels, axis=0).argmax())
        description = f"the label {self.labels[majority]!r} alone, the most frequent in train"
        return Baseline("most frequent label", description, repeat_for_rows(2 * np.eye(len(self.labels))[majority] - 1))


class LabelScorer(InsideF1):
    """Micro F1 over all pairs of a text and a label and, of the recorded samples, macro F1 and the exact match.

    A row is a pair; its classes are 0 (the text doesn't have the label) and 1.
    """

    def __init__(self, rows: Encoded | None = None):
        super().__init__(outside=0)
        self.labels = rows.labels.astype(bool) if rows is not None else np.zeros((0, 0), bool)
        self.predictions = np.zeros_like(self.labels)

    def record(self, rows: np.ndarray, batch: dict[str, Tensor], logits: Tensor) -> None:
        """Adds samples; logits [batch, labels]."""
        self.predictions[rows] = (logits > 0).numpy()
        labels = torch.from_numpy(self.labels[rows]).long().flatten()
        self.update(MultiLabel.output_rows.logits(batch, logits), labels)

    def scores(self) -> dict[str, float]:
        """Returns micro F1, macro F1 and the share of samples with exactly the true labels."""
        counts = (each.sum(0) for each in (self.predictions & self.labels, self.predictions, self.labels))
        correct, predicted, true = counts
        return {
            "micro F1": self.f1(),
            "macro F1": float((2 * correct / np.maximum(1, predicted + true)).mean()),
            "exact match": float((self.predictions == self.labels).all(1).mean()),
        }

    def decisions(self) -> np.ndarray:
        """Returns which labels are predicted, bool [samples, labels]."""
        return self.predictions


@dataclass(frozen=True)
class Regression(TextClassification):
    """Regression: a number for a text or a pair of texts."""

    name: ClassVar[str] = "regression"
    metric_name: ClassVar[str] = "Spearman"
    problem: ClassVar[Problem | None] = "regression"

    @classmethod
    def read(cls, config: DataConfig, seed: int) -> Splits:
        """Loads texts with a number each; see `load_numbers`."""
        return load_numbers(config, seed)

    def head_rows(self, config: PretrainedConfig) -> list[int] | None:
        """Returns the only row of a regression head whatever its name: most checkpoints name it LABEL_0."""
        fits = any(name.endswith(self.head) for name in config.architectures or [])
        return [0] if fits and config.num_labels == 1 and config.problem_type in (None, self.problem) else None

    def encode(self, tokenizer: PreTrainedTokenizerBase, part: Examples, max_length: int) -> Encoded:
        """Returns one row of token ids for each text or pair of texts, with the number as a float32 label."""
        rows = encode_samples(tokenizer, part, max_length)
        if not part.labels:
            return rows
        # A label equal to the marker of unlabelled rows would be left out of losses and scores, so the adjacent float
        # replaces it.
        return replace(rows, labels=np.where(rows.labels == IGNORED, NEAR_IGNORED, rows.labels))

    def scorer(self, rows: Encoded | None = None) -> Scorer:
        """Returns the scorer of numbers."""
        return NumberScorer(rows)

    def baseline(self, train: Examples) -> Baseline | None:
        """Returns the baseline that predicts the mean."""
        mean = float(np.mean(train.labels))
        return Baseline("mean", f"{mean:.4g}, the mean of train", repeat_for_rows(np.array([mean])))


class NumberScorer(Scorer):
    """Spearman's correlation and, of the recorded samples, Pearson's and the root of the mean squared error."""

    predicted: list[Tensor]
    true: list[Tensor]

    def __init__(self, rows: Encoded | None = None):
        super().__init__()
        for name in ("predicted", "true"):
            self.add_state(name, [], dist_reduce_fx="cat")
        self.labels = rows.labels.astype(np.float64) if rows is not None else np.zeros(0)
        self.predictions = np.zeros_like(self.labels)

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Adds the labelled rows; logits [rows, 1], labels [rows]."""
        labelled = labels != IGNORED
        self.predicted.append(logits[labelled, 0].float())
        self.true.append(labels[labelled].float())

    def compute(self) -> Tensor:
        """Returns Spearman's correlation over all processes, 0 where it is undefined."""
        predicted, true = (concatenate_state(each) for each in (self.predicted, self.true))
        correlation = spearman(predicted.double().cpu().numpy(), true.double().cpu().numpy())
        return predicted.new_tensor(np.nan_to_num(correlation))

    def record(self, rows: np.ndarray, batch: dict[str, Tensor], logits: Tensor) -> None:
        """Adds samples; logits [batch, 1]."""
        self.predictions[rows] = logits[:, 0].numpy()

    def scores(self) -> dict[str, float]:
        """Returns Spearman's and Pearson's correlation and the root of the mean squared error."""
        return {
            "Spearman": spearman(self.predictions, self.labels),
            "Pearson": pearson(self.predictions, self.labels),
            "RMSE": float(np.sqrt(np.mean((self.predictions - self.labels) ** 2))),
        }

    def decisions(self) -> np.ndarray:
        """Returns the predictions rounded to one decimal, the usual precision of labels."""
        return self.predictions.round(1)
