"""Text classification: single-label, multi-label and regression, for a text or a pair of texts."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from torchmetrics.regression import SpearmanCorrCoef
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from distill.checkpoint.tokenizer import agree_on_padding
from distill.data.batches.encode import IGNORED, Encoded, encode
from distill.data.config import DataConfig
from distill.data.splits.labelled import Examples, Splits, load_bare, load_labelled, load_numbers, load_splits
from distill.tasks.baseline import Baseline, same_for_rows
from distill.tasks.logit_rows import LabelRows, OutputRows
from distill.tasks.task import Scorer, Task, check_head, label_name, output_layer

__all__ = ["HEAD", "Regression", "MultiLabel", "TextClassification", "check_task", "output_layer", "label_name"]
HEAD = "ForSequenceClassification"
NEAR_IGNORED = np.nextafter(np.float32(IGNORED), np.float32(0))


@dataclass(frozen=True)
class TextClassification(Task):
    """Single-label classification of a text or a pair of texts."""

    name: ClassVar[str] = "text-classification"
    head: ClassVar[str] = HEAD
    metric_name: ClassVar[str] = "accuracy"
    problem: ClassVar[str | None] = "single_label_classification"

    @classmethod
    def read(cls, config: DataConfig, seed: int) -> Splits:
        return load_splits(config, seed)

    @classmethod
    def read_bare(cls, config: DataConfig) -> Examples:
        return load_bare(config)

    def settle(self, config: PretrainedConfig, folder: Path) -> None:
        agree_on_padding(config, folder)

    def encode(self, tokenizer: PreTrainedTokenizerBase, part: Any, max_length: int) -> Encoded:
        return encode(tokenizer, part, max_length)

    def metric(self) -> Metric:
        """Returns the accuracy over rows."""
        return MulticlassAccuracy(num_classes=len(self.labels), average="micro", ignore_index=IGNORED)

    def score(self, logits: Tensor, labels: Tensor) -> float:
        """Returns the share of rows whose largest logit is the label's; logits [rows, classes], labels [rows]."""
        return (logits.argmax(-1) == labels).double().mean().item()

    def scorer(self, rows: Encoded) -> Scorer:
        return ClassScorer(rows)

    def baseline(self, train: Any) -> Baseline | None:
        counts = np.bincount(train.labels, minlength=len(self.labels))
        most = int(counts.argmax())
        answer = f"the class {self.labels[most]!r}, the most frequent in train"
        return Baseline("majority class", answer, same_for_rows(np.eye(len(counts))[most]))


class ClassScorer:
    """Accuracy and macro F1."""

    def __init__(self, rows: Encoded):
        self.labels = rows.labels
        self.said = np.full(len(rows), -1, np.int64)
        self.classes = 0

    def update(self, rows: np.ndarray, batch: dict[str, Tensor], logits: Tensor) -> None:
        self.classes = logits.shape[-1]
        self.said[rows] = logits.argmax(-1).numpy()

    def scores(self) -> dict[str, float]:
        f1 = MulticlassF1Score(num_classes=self.classes, average="macro")
        macro = float(f1(torch.from_numpy(self.said), torch.from_numpy(self.labels)))
        return {"accuracy": float((self.said == self.labels).mean()), "macro F1": macro}

    def decisions(self) -> np.ndarray:
        return self.said


def check_task(config: PretrainedConfig, path: str) -> None:
    check_head(config, path, HEAD, TextClassification.name)


@dataclass(frozen=True)
class MultiLabel(TextClassification):
    """Multi-label classification: any number of classes per text."""

    metric_name: ClassVar[str] = "micro F1"
    problem: ClassVar[str | None] = "multi_label_classification"
    answers: ClassVar[OutputRows] = LabelRows()

    @classmethod
    def read(cls, config: DataConfig, seed: int) -> Splits:
        return load_labelled(config, seed)

    def metric(self) -> Metric:
        """Returns the micro F1 over all pairs of a text and a label."""
        return PositiveF1()

    def scorer(self, rows: Encoded) -> Scorer:
        return LabelScorer(rows)

    def baseline(self, train: Any) -> Baseline | None:
        most = int(np.sum(train.labels, axis=0).argmax())
        answer = f"the label {self.labels[most]!r} alone, the most frequent in train"
        return Baseline("most frequent label", answer, same_for_rows(2 * np.eye(len(self.labels))[most] - 1))


class PositiveF1(Metric):
    """F1 of the second of two classes over rows; rows without a label are ignored."""

    higher_is_better = True
    full_state_update = False
    right: Tensor
    said: Tensor
    true: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("right", "said", "true"):
            self.add_state(name, torch.zeros(()), dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        said, true = (logits[:, 1] > logits[:, 0]) & (labels != IGNORED), labels == 1
        self.right += (said & true).sum()
        self.said += said.sum()
        self.true += true.sum()

    def compute(self) -> Tensor:
        return 2 * self.right / (self.said + self.true).clamp(min=1)


class LabelScorer:
    """Micro and macro F1, and the share of texts with all labels correct."""

    def __init__(self, rows: Encoded):
        self.labels = rows.labels.astype(bool)
        self.said = np.zeros_like(self.labels)

    def update(self, rows: np.ndarray, batch: dict[str, Tensor], logits: Tensor) -> None:
        self.said[rows] = (logits > 0).numpy()

    def scores(self) -> dict[str, float]:
        right, said, true = ((each).sum(0) for each in (self.said & self.labels, self.said, self.labels))
        return {
            "micro F1": float(2 * right.sum() / max(1, said.sum() + true.sum())),
            "macro F1": float((2 * right / np.maximum(1, said + true)).mean()),
            "all right": float((self.said == self.labels).all(1).mean()),
        }

    def decisions(self) -> np.ndarray:
        return self.said


@dataclass(frozen=True)
class Regression(TextClassification):
    """Regression: a number for a text or a pair of texts."""

    metric_name: ClassVar[str] = "Spearman"
    problem: ClassVar[str | None] = "regression"

    @classmethod
    def read(cls, config: DataConfig, seed: int) -> Splits:
        return load_numbers(config, seed)

    def head_rows(self, config: PretrainedConfig) -> list[int] | None:
        """Returns the only row of a regression head whatever its name: most checkpoints name it LABEL_0."""
        fits = any(name.endswith(self.head) for name in config.architectures or [])
        return [0] if fits and config.num_labels == 1 and config.problem_type in (None, self.problem) else None

    def encode(self, tokenizer: PreTrainedTokenizerBase, part: Any, max_length: int) -> Encoded:
        rows = encode(tokenizer, part, max_length)
        if not part.labels:
            return rows
        # A label equal to the marker of unlabelled rows would be left out of losses and scores, so the adjacent float
        # replaces it.
        return replace(rows, labels=np.where(rows.labels == IGNORED, NEAR_IGNORED, rows.labels))

    def metric(self) -> Metric:
        return RankCorrelation()

    def scorer(self, rows: Encoded) -> Scorer:
        return NumberScorer(rows)

    def baseline(self, train: Any) -> Baseline | None:
        mean = float(np.mean(train.labels))
        return Baseline("mean", f"{mean:.4g}, the mean of train", same_for_rows(np.array([mean])))


class RankCorrelation(SpearmanCorrCoef):
    """Spearman's correlation of logits [rows, 1] with labels [rows]."""

    def update(self, logits: Tensor, labels: Tensor) -> None:
        known = labels != IGNORED
        super().update(logits[known, 0].float(), labels[known].float())


class NumberScorer:
    """Spearman's and Pearson's correlations, and the root of the mean squared error."""

    def __init__(self, rows: Encoded):
        self.labels = rows.labels.astype(np.float64)
        self.said = np.zeros_like(self.labels)

    def update(self, rows: np.ndarray, batch: dict[str, Tensor], logits: Tensor) -> None:
        self.said[rows] = logits[:, 0].numpy()

    def scores(self) -> dict[str, float]:
        from scipy.stats import pearsonr, spearmanr

        varied = np.ptp(self.said) > 0 and np.ptp(self.labels) > 0  # correlation with a constant is undefined
        return {
            "Spearman": float(spearmanr(self.said, self.labels).statistic) if varied else np.nan,
            "Pearson": float(pearsonr(self.said, self.labels).statistic) if varied else np.nan,
            "RMSE": float(np.sqrt(np.mean((self.said - self.labels) ** 2))),
        }

    def decisions(self) -> np.ndarray:
        """Returns the predictions rounded to one decimal, the usual precision of labels."""
        return self.said.round(1)
