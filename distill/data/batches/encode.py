"""Encoding of texts as token ids, and padding."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from distill.data.splits.examples import Examples
from distill.errors import InputError
from distill.losses.logits import IGNORED

ENCODED_AT_ONCE = 4096  # tokenized together: the tokenizer's own rows take ten times the memory of the ids
Batch = dict[str, Tensor]


class StoredRows(Sequence[np.ndarray]):
    """Rows of token ids, int64 [length] each, that are read from a file when they are used; replaces a list of them."""

    @property
    @abstractmethod
    def lengths(self) -> np.ndarray:
        """Number of tokens of each row, int64 [rows]; known without reading the rows."""

    def find_row(self, row: int) -> int:
        """Returns the number of a row from 0, where negative ones count from the end.

        Raises:
            IndexError: There is no such row.
        """
        if not -len(self) <= row < len(self):
            raise IndexError(row)
        return int(row) % len(self)


class TokenRows:
    """Base class of encoded splits: unpadded token ids and, if the tokenizer returns them, types, int64 [length] each.

    `positions` [length] are true where the model predicts; None if it predicts at every token or once per sample.
    """

    input_ids: Sequence[np.ndarray]
    token_type_ids: list[np.ndarray] | None

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each row, int64 [rows]."""
        if isinstance(self.input_ids, StoredRows):
            return self.input_ids.lengths
        return np.fromiter((len(row) for row in self.input_ids), np.int64, len(self))

    @property
    def positions(self) -> list[np.ndarray] | None:
        """Masks of the tokens at which the model predicts, bool [length] each; None as in the class's description."""
        return None

    @property
    def notes(self) -> dict[str, int]:
        """Nonzero counts of what was truncated or left out."""
        return {}

    def tokens(self, rows: Sequence[int] | np.ndarray, pad_id: int) -> Batch:
        """Returns the model's inputs, padded to the longest row: int64 [batch, length] each, `positions` bool."""
        batch = pad_tokens([self.input_ids[i] for i in rows], pad_id)
        if self.token_type_ids is not None:
            batch["token_type_ids"] = pad_rows([self.token_type_ids[i] for i in rows], 0)
        positions = self.positions
        if positions is not None:
            batch["positions"] = pad_rows([positions[i] for i in rows], 0).bool()
        return batch

    def join_tokens(self, other: "TokenRows") -> tuple[list[np.ndarray], list[np.ndarray] | None]:
        """Returns the ids and types of the rows of both, in order."""
        types = None
        if self.token_type_ids is not None and other.token_type_ids is not None:
            types = self.token_type_ids + other.token_type_ids
        return [*self.input_ids, *other.input_ids], types


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
        """The number of truncated texts, if there are any."""
        return {"cut": self.truncated} if self.truncated else {}

    def join(self, other: "Encoded") -> "Encoded":
        """Returns the rows of both, in order; the labels of unlabelled rows get the shape and type of this split's."""
        if not len(other):
            return self
        unlabelled = not (other.labels != IGNORED).any()
        appended = np.full((len(other), *self.labels.shape[1:]), IGNORED) if unlabelled else other.labels
        labels = np.concatenate([self.labels, appended.astype(self.labels.dtype)])
        return Encoded(*self.join_tokens(other), labels, self.truncated + other.truncated)

    def collate(self, rows: Sequence[int] | np.ndarray, pad_id: int, epoch: int = 0) -> Batch:
        """Pads the rows to the longest: int64 [batch, length] each; labels [batch] or [batch, names]."""
        return self.tokens(rows, pad_id) | {"labels": torch.from_numpy(self.labels[np.asarray(rows)])}


def pad_tokens(rows: Sequence[np.ndarray], pad_id: int) -> Batch:
    """Returns input_ids and attention_mask, int64 [rows, length] each."""
    return {
        "input_ids": pad_rows(rows, pad_id),
        "attention_mask": pad_rows([np.ones_like(row, np.int64) for row in rows], 0),
    }


def pad_rows(rows: Sequence[np.ndarray], value: int) -> Tensor:
    """Pads rows of integers with `value` on the right: int64 [rows, length of the longest]."""
    out = np.full((len(rows), max(map(len, rows))), value, np.int64)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return torch.from_numpy(out)


def encode_samples(tokenizer: PreTrainedTokenizerBase, examples: Examples, max_length: int) -> Encoded:
    """Tokenizes with special tokens, truncated to the smaller of `max_length` and the tokenizer's own limit."""
    limit = min(max_length, tokenizer.model_max_length)
    if not len(examples):
        return Encoded([], None, np.zeros(0, np.int64), 0)
    ids: list[np.ndarray] = []
    types: list[np.ndarray] = []
    truncated = 0
    for start in range(0, len(examples), ENCODED_AT_ONCE):
        part = slice(start, start + ENCODED_AT_ONCE)
        pairs = list(examples.pairs[part]) if examples.pairs is not None else None
        encoded = tokenizer(
            list(examples.texts[part]), pairs, truncation=True, max_length=limit, return_overflowing_tokens=True
        )
        # A truncated text is returned as several rows, of which only the first is used.
        owner = encoded["overflow_to_sample_mapping"]
        first = [i for i, sample in enumerate(owner) if i == 0 or owner[i - 1] != sample]
        ids += [np.asarray(encoded["input_ids"][i], np.int64) for i in first]
        if "token_type_ids" in encoded:
            types += [np.asarray(encoded["token_type_ids"][i], np.int64) for i in first]
        truncated += len({owner[i] for i in range(1, len(owner)) if owner[i] == owner[i - 1]})
    return Encoded(ids, types or None, _convert_labels(examples.labels or [IGNORED] * len(examples)), truncated)


def split_special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Returns the ids of the special tokens that the tokenizer puts before and after a text.

    Raises:
        InputError: A text has other tokens between them than without them.
    """
    whole, bare = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False))
    start = next((i for i in range(len(whole) - len(bare) + 1) if whole[i : i + len(bare)] == bare), None)
    if start is None:
        raise InputError(
            f"tokenizer {tokenizer.name_or_path!r}: expected the tokens {bare} of 'a' between special tokens, found "
            f"{whole}: special tokens can't be distinguished from those of a text"
        )
    return whole[:start], whole[start + len(bare) :]


def _convert_labels(labels: Sequence[object]) -> np.ndarray:
    """Converts class ids to int64, and numbers or several labels per row to float32.

    Stock model classes distinguish the tasks by these types.
    """
    values = np.asarray(labels)
    return values.astype(np.int64 if values.ndim == 1 and values.dtype.kind in "iu" else np.float32)
