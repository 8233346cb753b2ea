"""Fixed-length blocks of token ids for language models."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from distill.data.batches.encode import Batch, TokenRows, pad_rows
from distill.errors import InputError
from distill.losses.logits import IGNORED

TEXTS_AT_ONCE = 256  # tokenized together: a corpus as Python lists takes ten times the memory of its ids


def token_blocks(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], length: int, *, limit: int = 0
) -> list[np.ndarray]:
    """Joins all texts into one stream of tokens and splits it into blocks of `length`, int64 [length] each.

    With a `limit`, at most that many blocks are returned, and the texts after them are not tokenized.

    An end token (eos, or sep if there is no eos) follows every text. For a tokenizer with cls and sep each block is
    cls + `length` - 2 tokens of the stream + sep. The last block may be shorter; a single left-over token is dropped.

    Raises:
        InputError: `length` leaves fewer than two tokens of text per block, or the tokenizer has no end token.
    """
    end = find_end_token(tokenizer)
    if end is None:
        raise InputError(
            "tokenizer: expected an eos or a sep token, found neither: the end of one text and the start of the next "
            "would be learned as one sentence"
        )
    framed = is_framed(tokenizer)
    frame = 2 if framed else 0
    check_block_length(length, frame)
    step = length - frame
    stream = _build_stream(tokenizer, texts, end, limit * step)
    blocks = [stream[start : start + step] for start in range(0, max(len(stream) - 1, 0), step)]
    blocks = blocks[:limit] if limit else blocks
    if not framed:
        return blocks
    first, last = np.array([tokenizer.cls_token_id], np.int64), np.array([tokenizer.sep_token_id], np.int64)
    return [np.concatenate([first, block, last]) for block in blocks]


def is_framed(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Returns whether the tokenizer has a cls and a sep token, which then frame every block or document."""
    return tokenizer.cls_token_id is not None and tokenizer.sep_token_id is not None


def check_block_length(length: int, frame: int, what: str = "a block") -> None:
    """Checks that a row of `length` tokens has room for two tokens of text beside the `frame` special ones.

    Raises:
        InputError: It has no room.
    """
    if length < frame + 2:
        raise InputError(
            f"length: expected at least {frame + 2} tokens {what}, found {length}: "
            "there would be no next token to predict"
        )


def find_end_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Returns the id of the token that ends a text: eos, or sep if there is no eos; None if there is neither."""
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    return None if end is None else int(end)


def _build_stream(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], end: int, limit: int = 0) -> np.ndarray:
    """Returns the ids of all texts, each followed by `end`: int64 [tokens].

    With a `limit`, stops after the text with which there are more than that many tokens.
    """
    parts, count = [np.zeros(0, np.int64)], 0
    for start in range(0, len(texts), TEXTS_AT_ONCE):
        chunk = list(texts[start : start + TEXTS_AT_ONCE])
        rows = tokenizer(chunk, add_special_tokens=False, verbose=False)["input_ids"]  # no length warning
        parts += [np.array([*row, end], np.int64) for row in rows]
        count += sum(len(row) + 1 for row in rows)
        if limit and count > limit:
            break
    return np.concatenate(parts)


@dataclass(frozen=True)
class LanguageBlocks(TokenRows):
    """Blocks of token ids, int64 [length] each; `counted` are the counts of split texts and dropped tokens."""

    input_ids: Sequence[np.ndarray]
    token_type_ids: None = None
    counted: dict[str, int] = field(default_factory=dict)

    @property
    def notes(self) -> dict[str, int]:
        """Nonzero counts of split texts and dropped tokens."""
        return {name: count for name, count in self.counted.items() if count}

    def collate(self, rows: Sequence[int] | np.ndarray, pad_id: int, epoch: int = 0) -> Batch:
        """Pads the rows to the longest one: input_ids, attention_mask, labels, int64 [batch, length] each.

        The label of a position is the token after it, so logits and labels are compared without a shift; the last
        position of a row and the padding are IGNORED.
        """
        return self.tokens(rows, pad_id) | {"labels": shift_tokens([self.input_ids[i] for i in rows])}


def shift_tokens(rows: Sequence[np.ndarray]) -> Tensor:
    """Returns the token after each token, IGNORED for the last one and on padding: int64 [rows, length]."""
    return pad_rows([np.append(row[1:], IGNORED) for row in rows], IGNORED)
