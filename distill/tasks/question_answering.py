"""Extractive question answering: the span of a context that answers a question."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor
from torchmetrics.functional.text import squad
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from distill.checkpoint.tokenizer import check_fast
from distill.data.config import DataConfig
from distill.data.rows.questions import Questions, Windows, encode_questions, load_bare_questions, load_questions
from distill.data.splits.labelled import Splits
from distill.tasks.baseline import Baseline, no_answers
from distill.tasks.logit_rows import OutputRows, SpanRows
from distill.tasks.scorer import RowAccuracy, Scorer
from distill.tasks.task import Task

LONGEST = 30  # maximum number of tokens of an answer
NONE = np.zeros(0, np.int64)
NO_WINDOWS = Windows([], None, [], NONE, NONE, NONE, [], Questions([], []), 0)


@dataclass(frozen=True)
class QuestionAnswering(Task):
    """Extractive question answering by start and end positions; the first token means that there is no answer."""

    name: ClassVar[str] = "question-answering"
    head: ClassVar[str] = "ForQuestionAnswering"
    metric_name: ClassVar[str] = "F1"
    answers: ClassVar[OutputRows] = SpanRows()
    form: ClassVar[Any] = Questions

    @classmethod
    def read(cls, config: DataConfig, seed: int) -> Splits:
        return load_questions(config, seed)

    @classmethod
    def read_unlabelled(cls, config: DataConfig) -> Questions:
        return load_bare_questions(config)

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        check_fast(tokenizer, "tokenizer", "places of answers among a text's tokens aren't known without it")

    def encode(self, tokenizer: PreTrainedTokenizerBase, part: Any, max_length: int) -> Windows:
        return encode_questions(tokenizer, part, max_length)

    def scorer(self, rows: Windows | None = None) -> Scorer:
        """Returns the scorer of answers.

        In validation it scores the share of starts and ends at the correct token, as the windows of a question may be
        in different batches and on different processes.
        """
        return AnswerScorer(rows)

    def baseline(self, train: Any) -> Baseline | None:
        """Returns the baseline that predicts no answer, if train contains unanswerable questions."""
        return None if all(train.labels) else Baseline("no answer", "no answer", no_answers)

    def config(self, path: str) -> PretrainedConfig:
        config = super().config(path)
        config.num_labels = 2  # one logit for the start, one for the end
        return config

    def head_rows(self, config: PretrainedConfig) -> list[int] | None:
        return [] if any(name.endswith(self.head) for name in config.architectures or []) else None


class AnswerScorer(RowAccuracy):
    """Exact match and word F1 as computed by the SQuAD script, the best over the accepted answers.

    The prediction for a question is the span with the largest sum of logits over its windows, with at most LONGEST
    tokens; it is empty if no span exceeds the first token's sum in the window where that sum is smallest (SQuAD 2.0).

    Source: Devlin et al. 2019, BERT (arXiv 1810.04805), sections 4.2 and 4.3.
    """

    def __init__(self, rows: Windows | None = None):
        super().__init__()
        self.rows = rows if rows is not None else NO_WINDOWS
        self.spans: list[tuple[float, int, int]] = [(-np.inf, 0, 0)] * len(self.rows)
        self.none = np.full(len(self.rows), np.inf)

    def record(self, rows: np.ndarray, batch: dict[str, Tensor], logits: Tensor) -> None:
        values = logits.float().numpy()
        for place, row in enumerate(rows):
            inside = self.rows.allowed[row].copy()
            starts, ends = values[place, : len(inside), 0], values[place, : len(inside), 1]
            self.none[row] = starts[0] + ends[0]
            inside[0] = False
            self.spans[row] = best_span(starts, ends, inside)

    def texts(self) -> list[str]:
        """Returns the predicted answer to each question."""
        found = [""] * len(self.rows.part)
        best = np.full(len(found), -np.inf)
        none = np.full(len(found), np.inf)
        for row, owner in enumerate(self.rows.owners):
            score, first, last = self.spans[row]
            none[owner] = min(none[owner], self.none[row])
            if score > best[owner]:
                best[owner] = score
                offsets = self.rows.offsets[row]
                found[owner] = self.rows.part.pairs[owner][offsets[first, 0] : offsets[last, 1]]
        return [text if score > other else "" for text, score, other in zip(found, best, none, strict=True)]

    def scores(self) -> dict[str, float]:
        predicted: list[Any] = [{"id": str(i), "prediction_text": text} for i, text in enumerate(self.texts())]
        true: list[Any] = [
            {"id": str(i), "answers": {"text": [each.text for each in answers] or [""], "answer_start": [0]}}
            for i, answers in enumerate(self.rows.part.labels)
        ]
        found = squad(predicted, true)
        return {"F1": float(found["f1"]) / 100, "exact match": float(found["exact_match"]) / 100}

    def decisions(self) -> np.ndarray:
        return np.asarray(self.texts())


def best_span(starts: np.ndarray, ends: np.ndarray, inside: np.ndarray) -> tuple[float, int, int]:
    """Returns (sum of logits, first, last) of the best span among the tokens `inside`."""
    places = np.flatnonzero(inside)
    if not len(places):
        return -np.inf, 0, 0
    sums = starts[places][:, None] + ends[places][None]
    length = np.arange(len(places))[None] - np.arange(len(places))[:, None]
    sums = np.where((length >= 0) & (length < LONGEST), sums, -np.inf)
    first, last = np.unravel_index(sums.argmax(), sums.shape)
    return float(sums[first, last]), int(places[first]), int(places[last])
