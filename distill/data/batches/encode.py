"""Encoding of texts as token ids, and padding."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from distill.data.splits.labelled import Examples

IGNORED = -100  # a label that losses and metrics ignore
TEXTS_AT_ONCE = 4096  # tokenized together: the tokenizer's own rows take ten times the memory of the ids
Batch = dict[str, Tensor]


class TokenRows:
    """Base class of encoded splits: unpadded token ids and, if the tokenizer returns them, types, int64 [length] each.

    `positions` [length] are true where the model predicts; None if it predicts at every token or once per sample.
    """

    input_ids: list[np.ndarray]
    token_type_ids: list[np.ndarray] | None

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def lengths(self) -> np.ndarray:
        return np.fromiter((len(row) for row in self.input_ids), np.int64, len(self))

    @property
    def positions(self) -> list[np.ndarray] | None:
        return None

    @property
    def notes(self) -> dict[str, int]:
        """Nonzero counts of what was truncated or left out."""
        return {}

    def tokens(self, rows: Sequence[int] | np.ndarray, pad_id: int) -> Batch:
        """Returns the model's inputs, padded to the longest row: int64 [batch, length] each, `positions` bool."""
        batch = padded_tokens([self.input_ids[i] for i in rows], pad_id)
        if self.token_type_ids is not None:
            batch["token_type_ids"] = padded([self.token_type_ids[i] for i in rows], 0)
        positions = self.positions
        if positions is not None:
            batch["positions"] = padded([positions[i] for i in rows], 0).bool()
        return batch

    def tokens_joined(self, other: "TokenRows") -> tuple[list[np.ndarray], list[np.ndarray] | None]:
        """Returns the ids and types of the rows of both, in order."""
        types = None
        if self.token_type_ids is not None and other.token_type_ids is not None:
            types = self.token_type_ids + other.token_type_ids
        return self.input_ids + other.input_ids, types


@dataclass(frozen=True)
class Encoded(TokenRows):
    """Unpadded token ids of a split.

    `token_type_ids` is None for tokenizers that don't return them; `labels` contains IGNORED for unlabelled rows;
    `truncated` is the number of texts that were longer than the limit.
    """

    input_ids: list[np.ndarray]
    token_type_ids: list[np.ndarray] | None
    labels: np.ndarray
    truncated: int

    @property
    def notes(self) -> dict[str, int]:
        return {"cut": self.truncated} if self.truncated else {}

    def joined(self, other: "Encoded") -> "Encoded":
        """Returns the rows of both, in order; the labels of unlabelled rows get the shape and type of this split's."""
        if not len(other):
            return self
        unknown = not (other.labels != IGNORED).any()
        theirs = np.full((len(other), *self.labels.shape[1:]), IGNORED) if unknown else other.labels
        labels = np.concatenate([self.labels, theirs.astype(self.labels.dtype)])
        return Encoded(*self.tokens_joined(other), labels, self.truncated + other.truncated)

    def collate(self, rows: Sequence[int] | np.ndarray, pad_id: int, epoch: int = 0) -> Batch:
        """Pads the rows to the longest: int64 [batch, length] each; labels [batch] or [batch, names]."""
        return self.tokens(rows, pad_id) | {"labels": torch.from_numpy(self.labels[np.asarray(rows)])}


def padded_tokens(rows: Sequence[np.ndarray], pad_id: int) -> Batch:
    """Returns input_ids and attention_mask, int64 [rows, length] each."""
    return {
        "input_ids": padded(rows, pad_id),
        "attention_mask": padded([np.ones_like(row, np.int64) for row in rows], 0),
    }


def padded(rows: Sequence[np.ndarray], value: int) -> Tensor:
    out = np.full((len(rows), max(map(len, rows))), value, np.int64)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return torch.from_numpy(out)


def encode(tokenizer: PreTrainedTokenizerBase, examples: Examples, max_length: int) -> Encoded:
    """Tokenizes with special tokens, truncated to the smaller of `max_length` and the tokenizer's own limit."""
    limit = min(max_length, tokenizer.model_max_length)
    if not len(examples):
        return Encoded([], None, np.zeros(0, np.int64), 0)
    ids: list[np.ndarray] = []
    types: list[np.ndarray] = []
    truncated = 0
    for start in range(0, len(examples), TEXTS_AT_ONCE):
        part = slice(start, start + TEXTS_AT_ONCE)
        pairs = list(examples.pairs[part]) if examples.pairs is not None else None
        found = tokenizer(
            list(examples.texts[part]), pairs, truncation=True, max_length=limit, return_overflowing_tokens=True
        )
        # A truncated text is returned as several rows, of which only the first is used.
        owner = found["overflow_to_sample_mapping"]
        first = [i for i, sample in enumerate(owner) if i == 0 or owner[i - 1] != sample]
        ids += [np.asarray(found["input_ids"][i], np.int64) for i in first]
        if "token_type_ids" in found:
            types += [np.asarray(found["token_type_ids"][i], np.int64) for i in first]
        truncated += len({owner[i] for i in range(1, len(owner)) if owner[i] == owner[i - 1]})
    return Encoded(ids, types or None, as_labels(examples.labels or [IGNORED] * len(examples)), truncated)


def as_labels(labels: Sequence[Any]) -> np.ndarray:
    """Converts class ids to int64, and numbers or several labels per row to float32; stock model classes distinguish
    the tasks by these types.
    """
    found = np.asarray(labels)
    return found.astype(np.int64 if found.ndim == 1 and found.dtype.kind in "iu" else np.float32)
