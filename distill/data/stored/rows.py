"""Rows of stored tokens: blocks of one stream of all texts, or a row for each text, read when a batch needs them."""

from dataclasses import dataclass
from typing import overload

import numpy as np
from transformers import PreTrainedTokenizerBase

from distill.data.batches.encode import StoredRows
from distill.data.batches.packing import find_first_ids
from distill.data.batches.token_blocks import check_block_length, is_framed
from distill.data.stored.tokens import StoredTokens
from distill.errors import InputError


@dataclass(frozen=True)
class TextOrder:
    """The stream of stored texts in another order, without a copy of it.

    Args:
        texts: Numbers of the texts, in their order in the stream [texts].
        ends: Number of the stream's ids up to the end of each of them, int64 [texts].
    """

    texts: np.ndarray
    ends: np.ndarray

    @classmethod
    def build(cls, tokens: StoredTokens, order: np.ndarray) -> "TextOrder":
        """Returns the stream of the texts in this order, which takes 12 bytes of memory for each text."""
        texts = order.astype(np.uint32) if len(order) < 2**32 else order
        return cls(texts, np.cumsum(tokens.measure_lengths()[texts], dtype=np.int64))

    def read(self, tokens: StoredTokens, start: int, stop: int) -> np.ndarray:
        """Returns the ids of the stream from `start` up to `stop`, int64."""
        index, parts = int(np.searchsorted(self.ends, start, side="right")), []
        while start < stop:
            until, end = min(stop, int(self.ends[index])), int(tokens.ends[self.texts[index]])
            last = end - (int(self.ends[index]) - until)
            parts.append(tokens.read(last - (until - start), last))
            start, index = until, index + 1
        return np.concatenate(parts)


@dataclass(frozen=True)
class StreamBlocks(StoredRows):
    """Blocks of one stream of all texts, equal to those of `token_blocks`.

    Args:
        tokens: The ids.
        step: Tokens of the stream in a block.
        total: Tokens of the stream.
        before, after: Ids before and after those of the stream in each block.
        order: Order of the texts in the stream; as they are stored if None.
        first, blocks: Number of the first block, and of the blocks from there on.
    """

    tokens: StoredTokens
    step: int
    total: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    order: TextOrder | None
    first: int
    blocks: int

    @classmethod
    def build(
        cls,
        tokens: StoredTokens,
        tokenizer: PreTrainedTokenizerBase,
        length: int,
        *,
        order: np.ndarray | None = None,
        limit: int = 0,
    ) -> "StreamBlocks":
        """Returns at most `limit` blocks of `length` tokens; all if it is 0.

        Raises:
            InputError: `length` leaves fewer than two tokens of text per block.
        """
        frame = [int(tokenizer.cls_token_id), int(tokenizer.sep_token_id)] if is_framed(tokenizer) else []
        check_block_length(length, len(frame))
        step, total = length - len(frame), len(tokens.ids)
        count = len(range(0, max(total - 1, 0), step))  # a single left-over token is dropped
        return cls(
            tokens,
            step,
            total,
            tuple(frame[:1]),
            tuple(frame[1:]),
            None if order is None else TextOrder.build(tokens, order),
            0,
            min(count, limit or count),
        )

    def __len__(self) -> int:
        return self.blocks

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each block, int64 [blocks]."""
        frame = len(self.before) + len(self.after)
        lengths = np.full(self.blocks, self.step + frame, np.int64)
        if self.blocks:
            lengths[-1] = min(self.step, self.total - (self.first + self.blocks - 1) * self.step) + frame
        return lengths

    @overload
    def __getitem__(self, row: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, row: slice) -> "StreamBlocks": ...
    def __getitem__(self, row: int | slice) -> "np.ndarray | StreamBlocks":
        if isinstance(row, slice):
            start, stop, step = row.indices(self.blocks)
            if step != 1:
                raise ValueError(f"blocks: expected a slice of adjacent blocks, found a step of {step}")
            shown = self.first + start, max(0, stop - start)
            return StreamBlocks(
                self.tokens, self.step, self.total, self.before, self.after, self.order, shown[0], shown[1]
            )
        start = (self.first + self.find_row(row)) * self.step
        stop = min(start + self.step, self.total)
        ids = self.tokens.read(start, stop) if self.order is None else self.order.read(self.tokens, start, stop)
        return np.concatenate([self.before, ids, self.after], dtype=np.int64) if self.before else ids


@dataclass(frozen=True)
class TextRows(StoredRows):
    """A row for each text, or several for a longer one, equal to the documents of `text_documents`.

    Args:
        tokens: The ids.
        starts: First id of each row [rows].
        sizes: Number of stored ids of each row [rows].
        before, after: Ids before and after those of the text in each row.
        counted: The counts of `text_documents`.
    """

    tokens: StoredTokens
    starts: np.ndarray
    sizes: np.ndarray
    before: tuple[int, ...]
    after: tuple[int, ...]
    counted: dict[str, int]

    @classmethod
    def build(cls, tokens: StoredTokens, tokenizer: PreTrainedTokenizerBase, length: int) -> "TextRows":
        """Returns rows of at most `length` tokens.

        Raises:
            InputError: `length` leaves fewer than two tokens of text per row, or no text has two tokens.
        """
        framed = is_framed(tokenizer)
        before = (int(tokenizer.cls_token_id),) if framed else tuple(find_first_ids(tokenizer))
        after = (int(tokenizer.sep_token_id),) if framed else ()
        frame = len(before) + len(after)
        check_block_length(length, frame, "a document")
        step = length - frame
        sizes = tokens.measure_lengths() - (1 if framed else 0)  # a framed text has no end token of its own
        pieces = -(-sizes // step)
        left_over = sizes - (pieces - 1) * step == 1
        rows = pieces - left_over
        firsts = np.cumsum(rows, dtype=np.int64) - rows
        numbers = np.arange(int(rows.sum(dtype=np.int64)), dtype=np.int64) - np.repeat(firsts, rows)
        texts = tokens.ends - sizes - (1 if framed else 0)
        if not len(numbers):
            raise InputError(
                f"data: expected texts of two tokens or more, found none in {len(tokens)}: nothing to predict"
            )
        return cls(
            tokens,
            np.repeat(texts, rows) + numbers * step,
            np.minimum(np.repeat(sizes, rows) - numbers * step, step).astype(np.int32),
            before,
            after,
            {"cut_texts": int((pieces > 1).sum()), "dropped_tokens": int(left_over.sum())},
        )

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each row, int64 [rows]."""
        return self.sizes.astype(np.int64) + len(self.before) + len(self.after)

    @overload
    def __getitem__(self, row: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, row: slice) -> "TextRows": ...
    def __getitem__(self, row: int | slice) -> "np.ndarray | TextRows":
        if isinstance(row, slice):
            return TextRows(self.tokens, self.starts[row], self.sizes[row], self.before, self.after, self.counted)
        number = self.find_row(row)
        start = int(self.starts[number])
        ids = self.tokens.read(start, start + int(self.sizes[number]))
        return np.concatenate([self.before, ids, self.after], dtype=np.int64) if self.before else ids
