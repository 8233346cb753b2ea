"""Token ids of questions and contexts, in several windows for a long context."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from distill.data.batches.encode import TokenRows
from distill.data.rows.questions import Questions
from distill.data.sources.answer_cells import Answer, is_out_of_context
from distill.errors import InputError
from distill.losses.logits import IGNORED

WINDOW_SHARE = 3  # windows over a long context overlap by a third of their length, like BERT's 128 of 384


@dataclass(frozen=True)
class Windows(TokenRows):
    """Unpadded token ids of windows, each with a question and a part of its context.

    Args:
        input_ids, token_type_ids: As in `Encoded`.
        allowed: Positions at which an answer may start or end, bool [length]: the context's tokens, and the first
            token, which stands for "no answer".
        starts, ends: Positions of the first and the last token of the first answer that lies entirely in the window, 0
            if there is none; IGNORED if no answers are known or none is in the context.
        owners: Index of each window's question.
        offsets: Start and end character of each token in the context [length, 2].
        part: The questions.
        truncated: Number of questions whose context takes more than one window.
    """

    input_ids: list[np.ndarray]
    token_type_ids: list[np.ndarray] | None
    allowed: list[np.ndarray]
    starts: np.ndarray
    ends: np.ndarray
    owners: np.ndarray
    offsets: list[np.ndarray]
    part: Questions
    truncated: int

    @property
    def positions(self) -> list[np.ndarray]:
        """The tokens at which an answer may start or end, bool [length] each."""
        return self.allowed

    @property
    def notes(self) -> dict[str, int]:
        """Nonzero counts of questions in several windows, and of those whose answers aren't in the context."""
        lost = sum(map(is_out_of_context, self.part.labels))
        counted = {"in several windows": self.truncated, "whose answer isn't in its context": lost}
        return {what: count for what, count in counted.items() if count}

    def join(self, other: "Windows") -> "Windows":
        """Returns the windows of both, in order."""
        if not len(other):
            return self
        answers = [self.part.labels or [[]] * len(self.part), other.part.labels or [[]] * len(other.part)]
        return Windows(
            *self.join_tokens(other),
            self.allowed + other.allowed,
            np.concatenate([self.starts, other.starts]),
            np.concatenate([self.ends, other.ends]),
            np.concatenate([self.owners, other.owners + len(self.part)]),
            self.offsets + other.offsets,
            Questions(self.part.texts + other.part.texts, self.part.pairs + other.part.pairs, answers[0] + answers[1]),
            self.truncated + other.truncated,
        )

    def collate(self, rows: Sequence[int] | np.ndarray, pad_id: int, epoch: int = 0) -> dict[str, Tensor]:
        """Pads rows to the longest: int64 [batch, length], `positions` bool, `labels` (starts) and `ends` [batch]."""
        spans = {"labels": self.starts, "ends": self.ends}
        return self.tokens(rows, pad_id) | {
            name: torch.from_numpy(each[np.asarray(rows)]) for name, each in spans.items()
        }


def encode_questions(tokenizer: PreTrainedTokenizerBase, part: Questions, max_length: int) -> Windows:
    """Encodes each question with its context, in as many windows as the context takes.

    Raises:
        InputError: The tokenizer does not provide character offsets, or a question fills a window.
    """
    if not tokenizer.is_fast:
        raise InputError(
            f"tokenizer {type(tokenizer).__name__}: expected a fast one, which knows the characters of each token; "
            "answers couldn't be located"
        )
    empty = np.zeros(0, np.int64)
    if not len(part):
        return Windows([], None, [], empty, empty, empty, [], part, 0)
    limit = min(max_length, tokenizer.model_max_length)
    stride = limit // WINDOW_SHARE
    longest = max(len(ids) for ids in tokenizer(part.texts, add_special_tokens=False)["input_ids"])
    if longest + tokenizer.num_special_tokens_to_add(pair=True) + stride >= limit:
        raise InputError(
            f"data.max_length {limit}: expected room for a question and more of its context than windows overlap by, "
            f"found a question of {longest} tokens; take a larger one"
        )
    encoded = tokenizer(
        part.texts, part.pairs, truncation="only_second", max_length=limit, stride=stride,
        return_overflowing_tokens=True, return_offsets_mapping=True,
    )  # fmt: skip
    owners = np.asarray(encoded["overflow_to_sample_mapping"], np.int64)
    allowed, offsets, spans = [], [], []
    for row, owner in enumerate(owners):
        in_context = np.array([each == 1 for each in encoded.sequence_ids(row)])
        characters = np.asarray(encoded["offset_mapping"][row], np.int64)
        is_known = part.labels and not is_out_of_context(part.labels[owner])
        spans.append(_find_span(part.labels[owner], in_context, characters) if is_known else (IGNORED, IGNORED))
        in_context[0] = True
        allowed.append(in_context)
        offsets.append(characters)
    types = encoded.get("token_type_ids")
    starts, ends = np.asarray(spans, np.int64).T
    return Windows(
        [np.asarray(row, np.int64) for row in encoded["input_ids"]],
        [np.asarray(row, np.int64) for row in types] if types is not None else None,
        allowed,
        starts,
        ends,
        owners,
        offsets,
        part,
        int((np.bincount(owners) > 1).sum()),
    )


def _find_span(answers: Sequence[Answer], in_context: np.ndarray, offsets: np.ndarray) -> tuple[int, int]:
    """Returns the first and last token of the first answer that lies entirely in the window; (0, 0) if there is none.

    Args:
        answers: The accepted answers.
        in_context: Tokens of the context, bool [length].
        offsets: Start and end character of each token in the context [length, 2].
    """
    tokens = np.flatnonzero(in_context)
    for answer in answers:
        end = answer.start + len(answer.text)
        outside = not len(tokens) or offsets[tokens[0], 0] > answer.start or offsets[tokens[-1], 1] < end
        if outside or answer.start < 0:
            continue
        touched = tokens[(offsets[tokens, 1] > answer.start) & (offsets[tokens, 0] < end)]
        if len(touched):
            return int(touched[0]), int(touched[-1])
    return 0, 0
