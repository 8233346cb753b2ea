"""Token classification: a tag for each word, as in named-entity recognition or part-of-speech tagging."""

import re
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from distill.checkpoint.tokenizer import check_fast
from distill.data.config import DataConfig
from distill.data.rows.tagged import OUTSIDE, Tagged, load_all_words, load_tagged
from distill.data.rows.tagged_rows import TaggedRows, encode_tagged
from distill.data.splits.examples import Splits
from distill.losses.logits import IGNORED
from distill.tasks.baseline import Baseline, repeat_for_tokens
from distill.tasks.scorer import InsideF1, Scorer
from distill.tasks.task import Task

_NO_ROWS = TaggedRows([], None, [], [], [], [], 0)


@dataclass(frozen=True)
class TokenClassification(Task):
    """One tag per word; scored by spans if the tags mark spans (B-, I-, also E- and S-), otherwise by words."""

    name: ClassVar[str] = "token-classification"
    head: ClassVar[str] = "ForTokenClassification"
    metric_name: ClassVar[str] = "span F1"
    split_class: ClassVar[type[Tagged]] = Tagged

    @classmethod
    def read(cls, config: DataConfig, seed: int) -> Splits:
        """Loads tagged sentences; see `load_tagged`."""
        return load_tagged(config, seed)

    @classmethod
    def read_unlabelled(cls, config: DataConfig) -> Tagged:
        """Loads every training sentence, and the unlabelled ones."""
        return load_all_words(config)

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Checks that the tokenizer is fast.

        Raises:
            InputError: It is slow.
        """
        check_fast(tokenizer, "tokenizer", "the positions of words among a text's tokens would be unknown")

    def encode(self, tokenizer: PreTrainedTokenizerBase, part: Tagged, max_length: int) -> TaggedRows:
        """Returns sentences as token ids, with the tag of each word at its first token; see `encode_tagged`."""
        return encode_tagged(tokenizer, part, max_length)

    @property
    def has_spans(self) -> bool:
        """Whether the tags mark spans."""
        return all(tag == OUTSIDE or re.match(r"[BIES]-", tag) for tag in self.labels)

    def scorer(self, rows: TaggedRows | None = None) -> Scorer:
        """Returns the scorer of spans, or of words if the tags mark no spans."""
        return TagScorer(rows, self.labels, spans=self.has_spans)

    def baseline(self, train: Tagged) -> Baseline | None:
        """Returns the baseline that predicts the most frequent tag."""
        counts = np.bincount([tag for row in train.labels for tag in row], minlength=len(self.labels))
        majority = int(counts.argmax())
        description = f"the tag {self.labels[majority]!r}, the most frequent in train, for each of their words"
        return Baseline("most frequent tag", description, repeat_for_tokens(np.eye(len(counts))[majority]))


class TagScorer(InsideF1):
    """Span F1 as computed by seqeval (following the CoNLL script), and the share of words with the correct tag.

    Tags that mark no spans are scored by words: in validation the F1 of all tags except `O`, or the accuracy if there
    is no `O`. A word beyond the maximum sequence length counts as tagged `O`, or as wrong if there is no such tag.
    """

    def __init__(self, rows: TaggedRows | None, names: tuple[str, ...], *, spans: bool):
        super().__init__(names.index(OUTSIDE) if OUTSIDE in names else None)
        self.rows, self.names, self.spans = rows if rows is not None else _NO_ROWS, names, spans
        self.predictions: list[list[str]] = [[] for _ in range(len(self.rows))]

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Adds the words of a batch, sentence after sentence; logits [words, tags], labels [words].

        Nothing says where a sentence ends. No true span continues in the next one, whose first tag isn't I-; a
        predicted span that does is counted as wrong.
        """
        if not self.spans:
            super().update(logits, labels)
            return
        known = labels != IGNORED
        true, predicted = (self.find_spans(tags[known]) for tags in (labels, logits.argmax(-1)))
        self.correct += len(true & predicted)
        self.predicted += len(predicted)
        self.true += len(true)

    def find_spans(self, tags: Tensor) -> set[tuple[str, int, int]]:
        """Returns (type, first word, last word) of the spans among tags [words]."""
        from seqeval.metrics.sequence_labeling import get_entities

        return set(get_entities([self.names[tag] for tag in tags.tolist()]))

    def record(self, rows: np.ndarray, batch: dict[str, Tensor], logits: Tensor) -> None:
        """Adds sentences; logits [batch, length, tags]."""
        tags = logits.argmax(-1).numpy()
        for i, row in enumerate(rows):
            firsts = self.rows.firsts[row]
            self.predictions[row] = [self.names[tag] for tag in tags[i, : len(firsts)][firsts]]

    def scores(self) -> dict[str, float]:
        """Returns F1, precision and recall of spans if there are any, and the accuracy of words."""
        true = [[self.names[i] for i in tags] for tags in self.rows.tags]
        predicted = [self.align(row) for row in range(len(self.rows))]
        pairs = [(a, b) for one, other in zip(true, predicted, strict=True) for a, b in zip(one, other, strict=True)]
        accuracy = sum(a == b for a, b in pairs) / max(1, len(pairs))
        if not self.spans:
            return {"accuracy": accuracy}
        from seqeval.metrics import f1_score, precision_score, recall_score

        return {
            "span F1": float(f1_score(true, predicted, zero_division=0)),
            "precision": float(precision_score(true, predicted, zero_division=0)),
            "recall": float(recall_score(true, predicted, zero_division=0)),
            "accuracy": accuracy,
        }

    def align(self, row: int) -> list[str]:
        """Returns a predicted tag for every word of the sentence."""
        aligned = [OUTSIDE if OUTSIDE in self.names else "?"] * len(self.rows.tags[row])
        for word, tag in zip(self.rows.words[row], self.predictions[row], strict=True):
            aligned[word] = tag
        return aligned

    def decisions(self) -> np.ndarray:
        """Returns the predicted tag of each word, str [words]."""
        return np.array([tag for row in range(len(self.rows)) for tag in self.align(row)])
