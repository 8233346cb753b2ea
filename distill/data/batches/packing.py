"""Packing of documents of different lengths into rows, without attention between documents."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from distill.data.batches.batches import EncodedRows
from distill.data.batches.encode import Batch
from distill.data.batches.token_blocks import (
    TEXTS_AT_ONCE,
    LanguageBlocks,
    check_block_length,
    find_end_token,
    is_framed,
)
from distill.errors import InputError
from distill.losses.logits import IGNORED


def best_fit(lengths: Sequence[int] | np.ndarray, length: int, seed: int = 0) -> list[np.ndarray]:
    """Packs documents into rows of at most `length` tokens: the longest first, each into the fullest row that has room.

    The order of documents of equal length, of documents in a row and of the rows depends only on the seed.

    Args:
        lengths: Number of tokens of each document [documents].
        length: Maximum number of tokens per row.
        seed: Seed of the order.

    Returns:
        The indices of each row's documents, int64 [documents of the row]; every document is in exactly one row.

    Raises:
        InputError: A document has no tokens or more than `length`, or the seed is negative.

    Source: best-fit packing, Ding et al. 2024 (arXiv:2404.10830); free space is looked up in a sorted list instead of
        a segment tree, since there are at most `length` different values.
    """
    sizes = np.asarray(lengths, np.int64)
    if seed < 0:
        raise InputError(f"packing seed: expected 0 or more, found {seed}: the random generator takes no other")
    wrong = np.flatnonzero((sizes < 1) | (sizes > length))
    if len(wrong):
        raise InputError(
            f"packing: expected documents of 1 to {length} tokens, found {sizes[wrong[0]]} in document {wrong[0]}: "
            "it would not fit into a row"
        )
    # Raw bits: NumPy's shuffling may change between versions, and a cache of signals on packed rows must stay valid.
    draws = np.random.Philox(key=seed).random_raw(2 * len(sizes)).reshape(2, -1)
    rows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(length + 1)]  # indices of the rows, by free tokens
    rooms: list[int] = []  # sorted numbers of free tokens for which `with_room` has rows
    for document in np.lexsort((draws[0], -sizes)).tolist():
        size = int(sizes[document])
        index = bisect_left(rooms, size)
        if index == len(rooms):
            row, room = len(rows), length
            rows.append([])
        else:
            room = rooms[index]
            row = with_room[room].pop()
            if not with_room[room]:
                del rooms[index]
        rows[row].append(document)
        left = room - size
        if left and not with_room[left]:
            rooms.insert(bisect_left(rooms, left), left)
        with_room[left].append(row)
    packed = [np.asarray(sorted(row, key=draws[1].__getitem__), np.int64) for row in rows]
    return sorted(packed, key=lambda row: int(draws[1][row[0]]))


@dataclass(frozen=True)
class PackedRows:
    """Rows of packed documents.

    Args:
        documents: The documents, whose batches have [documents, length] fields: `LanguageBlocks`, `MaskedBlocks`,
            `TargetBlocks`. A document's labels and masks don't depend on its row.
        rows: The indices of each row's documents, as returned by `best_fit`.
    """

    documents: EncodedRows
    rows: list[np.ndarray]

    @classmethod
    def build(cls, documents: EncodedRows, length: int, seed: int = 0) -> "PackedRows":
        """Packs the documents with `best_fit`.

        Raises:
            InputError: As in `best_fit`.
        """
        return cls(documents, best_fit(documents.lengths, length, seed))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def notes(self) -> dict[str, int]:
        """The documents' counts of what was truncated or left out."""
        return getattr(self.documents, "notes", {})

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each row, int64 [rows]."""
        sizes = self.documents.lengths
        return np.fromiter((sizes[row].sum() for row in self.rows), np.int64, len(self))

    def collate(self, rows: Sequence[int] | np.ndarray, pad_id: int, epoch: int = 0) -> Batch:
        """Concatenates the documents of each row, padded to the longest row.

        Returns:
            The fields of the documents' own batches, [batch, length] each: input_ids, attention_mask, labels, and
            `positions` if only some are predicted. In addition, int64: `position_ids`, from 0 in every document, and
            `documents`, the number of the document in its row from 1; both are 0 on padding. From these two,
            `packed_inputs` builds the inputs with which a model separates the documents.
        """
        selected = [self.rows[i] for i in rows]
        parts = self.documents.collate(np.concatenate(selected), pad_id, epoch)
        is_token = parts["attention_mask"].bool()
        sizes = is_token.sum(1)
        counts = torch.tensor([len(row) for row in selected])
        owners = torch.arange(len(selected)).repeat_interleave(counts)
        numbers = torch.cat([torch.arange(1, count + 1) for count in counts.tolist()])
        totals = torch.zeros(len(selected), dtype=torch.long).index_add_(0, owners, sizes)
        mask = torch.arange(int(totals.max())) < totals[:, None]

        def pack(tokens: Tensor, value: int) -> Tensor:
            out = torch.full(mask.shape, value, dtype=tokens.dtype)
            out[mask] = tokens  # both are ordered by row and by position in the row
            return out

        fills = {"input_ids": pad_id, "labels": IGNORED}
        batch = {name: pack(value[is_token], fills.get(name, 0)) for name, value in parts.items()}
        batch["position_ids"] = pack(torch.arange(is_token.shape[1]).expand_as(is_token)[is_token], 0)
        batch["documents"] = pack(numbers.repeat_interleave(sizes), 0)
        return batch


def text_documents(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], length: int) -> LanguageBlocks:
    """Tokenizes each text separately; texts longer than `length` tokens are split into several documents.

    For a tokenizer with cls and sep, every document is framed by the two. For any other, every document starts with the
    bos token if the tokenizer adds one, and the last document of a text ends with an end token (eos, or sep if there is
    no eos). A single left-over token is dropped.

    Returns:
        The documents, with the counts `cut_texts` and `dropped_tokens` (single left-over tokens).

    Raises:
        InputError: `length` leaves fewer than two tokens of text per document, the tokenizer has no end token, or no
            text has two tokens.
    """
    framed = is_framed(tokenizer)
    first = [int(tokenizer.cls_token_id)] if framed else find_first_ids(tokenizer)
    last = [int(tokenizer.sep_token_id)] if framed else []
    end = [] if framed else [require_end_token(tokenizer)]
    step = length - len(first) - len(last)
    check_block_length(length, len(first) + len(last), "a document")
    documents: list[np.ndarray] = []
    notes = {"cut_texts": 0, "dropped_tokens": 0}
    for start in range(0, len(texts), TEXTS_AT_ONCE):
        chunk = list(texts[start : start + TEXTS_AT_ONCE])
        for row in tokenizer(chunk, add_special_tokens=False, verbose=False)["input_ids"]:
            row = [*row, *end]
            pieces = [row[i : i + step] for i in range(0, len(row), step)]
            whole = [piece for piece in pieces if len(piece) > 1]
            notes["cut_texts"] += len(pieces) > 1
            notes["dropped_tokens"] += len(pieces) - len(whole)
            documents += [np.array([*first, *piece, *last], np.int64) for piece in whole]
    if not documents:
        raise InputError(f"data: expected texts of two tokens or more, found none in {len(texts)}: nothing to predict")
    return LanguageBlocks(documents, counted=notes)


def find_first_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns the ids that the tokenizer puts before a text: its bos token or nothing."""
    bos = tokenizer.bos_token_id
    return [int(bos)] if bos is not None and tokenizer("")["input_ids"][:1] == [bos] else []


def require_end_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Returns the id of the token that ends a text: eos, or sep if there is no eos.

    Raises:
        InputError: The tokenizer has neither.
    """
    end = find_end_token(tokenizer)
    if end is None:
        raise InputError(
            "tokenizer: expected an eos or a sep token, found neither: the end of a text could not be learned"
        )
    return end


def find_padding_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Returns the padding id: the padding token, else eos, else 0; masks exclude padding by position, not by id."""
    known = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((int(each) for each in known if each is not None), 0)
