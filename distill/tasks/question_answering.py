"""Extractive question answering: the span of a context that answers a question."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor
from torchmetrics.functional.text import squad
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from distill.checkpoint.tokenizer import check_fast
from distill.data.config import DataConfig
from distill.data.rows.questions import Questions, load_all_questions, load_questions
from distill.data.rows.windows import Windows, encode_questions
from distill.data.splits.examples import Splits
from distill.tasks.baseline import Baseline, predict_no_answers
from distill.tasks.logit_rows import OutputRows, SpanRows
from distill.tasks.scorer import RowAccuracy, Scorer
from distill.tasks.task import Task

MAX_ANSWER_TOKENS = 30
_EMPTY = np.zeros(0, np.int64)
_NO_WINDOWS = Windows([], None, [], _EMPTY, _EMPTY, _EMPTY, [], Questions([], []), 0)


@dataclass(frozen=True)
class QuestionAnswering(Task):
    """Extractive question answering by start and end positions; the first token means that there is no answer."""

    name: ClassVar[str] = "question-answering"
    head: ClassVar[str] = "ForQuestionAnswering"
    metric_name: ClassVar[str] = "F1"
    output_rows: ClassVar[OutputRows] = SpanRows()
    split_class: ClassVar[type[Questions]] = Questions

    @classmethod
    def read(cls, config: DataConfig, seed: int) -> Splits:
        """Loads questions with contexts and answers; see `load_questions`."""
        return load_questions(config, seed)

    @classmethod
    def read_unlabelled(cls, config: DataConfig) -> Questions:
        """Loads every training question with its context, and the unlabelled ones."""
        return load_all_questions(config)

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Checks that the tokenizer is fast.

        Raises:
            InputError: It is slow.
        """
        check_fast(tokenizer, "tokenizer", "the positions of answers among a text's tokens would be unknown")

    def encode(self, tokenizer: PreTrainedTokenizerBase, part: Questions, max_length: int) -> Windows:
        """Returns questions as windows over their contexts; see `encode_questions`."""
        return encode_questions(tokenizer, part, max_length)

    def scorer(self, rows: Windows | None = None) -> Scorer:
        """Returns the scorer of answers.

        In validation it scores the share of starts and ends at the correct token, as the windows of a question may be
        in different batches and on different processes.
        """
        return AnswerScorer(rows)

    def baseline(self, train: Questions) -> Baseline | None:
        """Returns the baseline that predicts no answer, if train contains unanswerable questions."""
        return None if all(train.labels) else Baseline("no answer", "no answer", predict_no_answers)

    def config(self, path: str) -> PretrainedConfig:
        """Reads a checkpoint's config and sets two outputs per token: one for the start, one for the end."""
        config = super().config(path)
        config.num_labels = 2
        return config

    def head_rows(self, config: PretrainedConfig) -> list[int] | None:
        """Returns no rows for a checkpoint with a span head, which is used unchanged; None for any other."""
        return [] if any(name.endswith(self.head) for name in config.architectures or []) else None


class AnswerScorer(RowAccuracy):
    """Exact match and word F1 as computed by the SQuAD script, the best over the accepted answers.

    The prediction for a question is the span with the largest sum of logits over its windows, with at most
    MAX_ANSWER_TOKENS tokens; it is empty if no span exceeds the first token's sum in the window where that sum is
    smallest (SQuAD 2.0).

    Source: Devlin et al. 2019, BERT (arXiv 1810.04805), sections 4.2 and 4.3.
    """

    def __init__(self, rows: Windows | None = None):
        super().__init__()
        self.rows = rows if rows is not None else _NO_WINDOWS
        self.spans: list[tuple[float, int, int]] = [(-np.inf, 0, 0)] * len(self.rows)
        self.no_answer = np.full(len(self.rows), np.inf)  # sum of the first token's logits, for each window

    def record(self, rows: np.ndarray, batch: dict[str, Tensor], logits: Tensor) -> None:
        """Adds windows; logits [batch, length, 2] of start and end."""
        values = logits.float().numpy()
        for i, row in enumerate(rows):
            allowed = self.rows.allowed[row].copy()
            starts, ends = values[i, : len(allowed), 0], values[i, : len(allowed), 1]
            self.no_answer[row] = starts[0] + ends[0]
            allowed[0] = False
            self.spans[row] = find_best_span(starts, ends, allowed)

    def texts(self) -> list[str]:
        """Returns the predicted answer to each question."""
        texts = [""] * len(self.rows.part)
        best = np.full(len(texts), -np.inf)
        no_answer = np.full(len(texts), np.inf)
        for row, question in enumerate(self.rows.owners):
            score, first, last = self.spans[row]
            no_answer[question] = min(no_answer[question], self.no_answer[row])
            if score > best[question]:
                best[question] = score
                offsets = self.rows.offsets[row]
                texts[question] = self.rows.part.pairs[question][offsets[first, 0] : offsets[last, 1]]
        return [text if score > other else "" for text, score, other in zip(texts, best, no_answer, strict=True)]

    def scores(self) -> dict[str, float]:
        """Returns the word F1 and the exact match of the predicted answers."""
        predicted: list[Any] = [{"id": str(i), "prediction_text": text} for i, text in enumerate(self.texts())]
        true: list[Any] = [
            {"id": str(i), "answers": {"text": [each.text for each in answers] or [""], "answer_start": [0]}}
            for i, answers in enumerate(self.rows.part.labels)
        ]
        metrics = squad(predicted, true)
        return {"F1": float(metrics["f1"]) / 100, "exact match": float(metrics["exact_match"]) / 100}

    def decisions(self) -> np.ndarray:
        """Returns the predicted answer to each question, str [questions]."""
        return np.asarray(self.texts())


def find_best_span(starts: np.ndarray, ends: np.ndarray, allowed: np.ndarray) -> tuple[float, int, int]:
    """Returns (sum of logits, first, last) of the best span among the `allowed` tokens; all arguments are [length]."""
    tokens = np.flatnonzero(allowed)
    if not len(tokens):
        return -np.inf, 0, 0
    sums = starts[tokens][:, None] + ends[tokens][None]
    length = np.arange(len(tokens))[None] - np.arange(len(tokens))[:, None]
    sums = np.where((length >= 0) & (length < MAX_ANSWER_TOKENS), sums, -np.inf)
    first, last = np.unravel_index(sums.argmax(), sums.shape)
    return float(sums[first, last]), int(tokens[first]), int(tokens[last])
