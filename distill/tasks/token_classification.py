"""Token classification: a tag for each word, as in named-entity recognition or part-of-speech tagging."""

import re
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from transformers import PreTrainedTokenizerBase

from distill.checkpoint.tokenizer import check_fast
from distill.data.batches.encode import IGNORED
from distill.data.config import DataConfig
from distill.data.rows.tagged import OUTSIDE, Tagged, TaggedRows, encode_tagged, load_bare_words, load_tagged
from distill.data.splits.labelled import Splits
from distill.tasks.baseline import Baseline, same_for_tokens
from distill.tasks.task import Scorer, Task


@dataclass(frozen=True)
class TokenClassification(Task):
    """One tag per word; scored by spans if the tags mark spans (B-, I-, also E- and S-), otherwise by words."""

    name: ClassVar[str] = "token-classification"
    head: ClassVar[str] = "ForTokenClassification"
    metric_name: ClassVar[str] = "span F1"
    form: ClassVar[Any] = Tagged

    @classmethod
    def read(cls, config: DataConfig, seed: int) -> Splits:
        return load_tagged(config, seed)

    @classmethod
    def read_bare(cls, config: DataConfig) -> Tagged:
        return load_bare_words(config)

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        check_fast(tokenizer, "tokenizer", "places of words among a text's tokens aren't known without it")

    def encode(self, tokenizer: PreTrainedTokenizerBase, part: Any, max_length: int) -> TaggedRows:
        return encode_tagged(tokenizer, part, max_length)

    @property
    def has_spans(self) -> bool:
        return all(tag == OUTSIDE or re.match(r"[BIES]-", tag) for tag in self.labels)

    def metric(self) -> Metric:
        """Returns the word-level metric used in training: the F1 of all tags except `O`, or the accuracy if the tags do
        not include `O`.

        Spans are scored only after training: span F1 needs whole sentences, which validation does not keep together
        over processes.
        """
        if OUTSIDE not in self.labels:
            return MulticlassAccuracy(num_classes=len(self.labels), average="micro", ignore_index=IGNORED)
        return InsideF1(len(self.labels), self.labels.index(OUTSIDE))

    def scorer(self, rows: TaggedRows) -> Scorer:
        return TagScorer(rows, self.labels, spans=self.has_spans)

    def baseline(self, train: Any) -> Baseline | None:
        counts = np.bincount([tag for row in train.labels for tag in row], minlength=len(self.labels))
        most = int(counts.argmax())
        answer = f"the tag {self.labels[most]!r}, the most frequent in train, for each of their words"
        return Baseline("most frequent tag", answer, same_for_tokens(np.eye(len(counts))[most]))


class InsideF1(MulticlassF1Score):
    """Micro F1 over all classes except `outside`."""

    def __init__(self, classes: int, outside: int):
        super().__init__(num_classes=classes, average="none", ignore_index=IGNORED)
        self.outside = outside

    def compute(self) -> Tensor:
        counts = [getattr(self, name).float() for name in ("tp", "fp", "fn")]
        tp, fp, fn = (each.sum() - each[self.outside] for each in counts)
        return 2 * tp / (2 * tp + fp + fn).clamp(min=1)


class TagScorer:
    """Span F1 as computed by seqeval (following the CoNLL script), and the share of words with the correct tag.

    A word beyond the maximum sequence length counts as tagged `O`, or as wrong if there is no such tag.
    """

    def __init__(self, rows: TaggedRows, names: tuple[str, ...], *, spans: bool):
        self.rows, self.names, self.spans = rows, names, spans
        self.said: list[list[str]] = [[] for _ in range(len(rows))]

    def update(self, rows: np.ndarray, batch: dict[str, Tensor], logits: Tensor) -> None:
        numbers = logits.argmax(-1).numpy()
        for place, row in enumerate(rows):
            firsts = self.rows.firsts[row]
            self.said[row] = [self.names[i] for i in numbers[place, : len(firsts)][firsts]]

    def scores(self) -> dict[str, float]:
        true = [[self.names[i] for i in tags] for tags in self.rows.tags]
        said = [self.aligned(row) for row in range(len(self.rows))]
        pairs = [(a, b) for one, other in zip(true, said, strict=True) for a, b in zip(one, other, strict=True)]
        accuracy = sum(a == b for a, b in pairs) / max(1, len(pairs))
        if not self.spans:
            return {"accuracy": accuracy}
        from seqeval.metrics import f1_score, precision_score, recall_score

        return {
            "span F1": float(f1_score(true, said, zero_division=0)),
            "precision": float(precision_score(true, said, zero_division=0)),
            "recall": float(recall_score(true, said, zero_division=0)),
            "accuracy": accuracy,
        }

    def aligned(self, row: int) -> list[str]:
        """Returns a predicted tag for every word of the sentence."""
        said = [OUTSIDE if OUTSIDE in self.names else "?"] * len(self.rows.tags[row])
        for word, tag in zip(self.rows.places[row], self.said[row], strict=True):
            said[word] = tag
        return said

    def decisions(self) -> np.ndarray:
        return np.array([tag for row in range(len(self.rows)) for tag in self.aligned(row)])
