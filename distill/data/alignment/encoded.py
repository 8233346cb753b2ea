"""Texts encoded for a student and a teacher with different tokenizers, as rows from which batches are built."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from distill.data.alignment.tokens import align_spans, check_offsets
from distill.data.batches.encode import Batch, TokenRows, pad_tokens, split_special_tokens
from distill.data.batches.token_blocks import TEXTS_AT_ONCE, find_end_token, shift_tokens
from distill.errors import InputError


@dataclass(frozen=True)
class AlignedRows(TokenRows):
    """Unpadded pieces of text in both the student's and the teacher's tokens; replaces `LanguageBlocks`.

    Args:
        input_ids, teacher_input_ids: int64 [length] each.
        spans: Token spans that cover the same characters: start and end in the student's tokens, start and end in the
            teacher's [spans, 4]. They leave no gaps, and the end of a text is a span; spans with an unknown token are
            left out.
        teacher_pad_id: Padding id of the teacher.
        unaligned: Number of spans longer than a row, plus texts without a token in one of the tokenizers; left out.
        single: Number of pieces with a single token on either side; left out.
        unknown: Number of spans with an unknown token; they stay in the input but are not compared.
    """

    input_ids: list[np.ndarray]
    teacher_input_ids: list[np.ndarray]
    spans: list[np.ndarray]
    teacher_pad_id: int
    unaligned: int
    single: int
    unknown: int
    token_type_ids: None = None

    @property
    def notes(self) -> dict[str, int]:
        """Nonzero counts of the spans and pieces that are left out or not compared."""
        return {name: count for name in ("unaligned", "single", "unknown") if (count := getattr(self, name))}

    def collate(self, rows: Sequence[int] | np.ndarray, pad_id: int, epoch: int = 0) -> Batch:
        """Pads the rows to the longest one, for causal models: int64 [batch, length] each.

        input_ids, attention_mask and labels are the student's; the teacher's names are prefixed with `teacher_`. The
        label of a position is the token after it, as in `LanguageBlocks`. `spans` [batch, spans, 4] are positions, not
        tokens: a token is predicted at the position before it. Spans that begin with a row's first token, which is
        never predicted, are left out; a span with equal start and end is padding.
        """
        predicted = [each[(each[:, 0] > 0) & (each[:, 2] > 0)] - 1 for each in (self.spans[i] for i in rows)]
        batch = {"spans": pad_spans(predicted)}
        for prefix, all_ids, pad in (
            ("", self.input_ids, pad_id),
            ("teacher_", self.teacher_input_ids, self.teacher_pad_id),
        ):
            ids = [all_ids[i] for i in rows]
            fields = pad_tokens(ids, pad) | {"labels": shift_tokens(ids)}
            batch |= {f"{prefix}{name}": value for name, value in fields.items()}
        return batch


def pad_spans(rows: Sequence[np.ndarray]) -> Tensor:
    """Pads the spans of each row with zeros: int64 [batch, spans, 4]."""
    out = np.zeros((len(rows), max(map(len, rows)), 4), np.int64)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return torch.from_numpy(out)


def select_teacher_inputs(batch: Batch) -> Batch:
    """Returns the teacher's inputs in a batch: input_ids and attention_mask."""
    return {name: batch[f"teacher_{name}"] for name in ("input_ids", "attention_mask")}


def encode_aligned(
    tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    length: int,
    teacher_length: int,
) -> AlignedRows:
    """Splits texts into pieces of at most `length` student tokens and at most `teacher_length` teacher tokens.

    Both tokenizers encode the whole text. It is split where a token ends in both, as late as the lengths allow; no
    piece contains text of two documents. Each piece is framed by the special tokens that its tokenizer puts around a
    text (cls and sep, or bos, or none), and the last piece of a text ends with an end token (eos, or sep if there is
    no eos).

    Raises:
        InputError: A tokenizer is slow or has no end token, or a length leaves room for fewer than two tokens of text.
    """
    check_offsets(tokenizer, teacher_tokenizer)
    sides = [
        _Side.build(each, limit, name)
        for each, limit, name in ((tokenizer, length, "length"), (teacher_tokenizer, teacher_length, "teacher_length"))
    ]
    rows: tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]] = ([], [], [])
    counts = {"unaligned": 0, "single": 0, "unknown": 0}
    for (ids, offsets), (teacher_ids, teacher_offsets) in zip(*(each.encode(texts) for each in sides), strict=True):
        spans = align_spans(offsets, teacher_offsets)
        if not len(spans):
            counts["unaligned"] += 1
            continue
        ids, teacher_ids = np.append(ids, sides[0].end), np.append(teacher_ids, sides[1].end)
        spans = np.append(spans, [[len(ids) - 1, len(ids), len(teacher_ids) - 1, len(teacher_ids)]], 0)
        # Start each span where the previous one ends: a token for a blank may have no characters but is still text.
        spans[1:, [0, 2]], spans[0, [0, 2]] = spans[:-1, [1, 3]], 0
        for first, last in split_spans(spans, (sides[0].room, sides[1].room)):
            if first == last:
                counts["unaligned"] += 1
                continue
            (start, teacher_start), (end, teacher_end) = spans[first, [0, 2]], spans[last - 1, [1, 3]]
            if min(end - start, teacher_end - teacher_start) < 2:
                counts["single"] += 1
                continue
            piece, teacher_piece = ids[start:end], teacher_ids[teacher_start:teacher_end]
            inside = spans[first:last] - np.array([start, start, teacher_start, teacher_start])
            known = ~(
                _contain_token(piece, sides[0].unknown, inside[:, :2])
                | _contain_token(teacher_piece, sides[1].unknown, inside[:, 2:])
            )
            counts["unknown"] += int((~known).sum())
            rows[0].append(sides[0].frame(piece))
            rows[1].append(sides[1].frame(teacher_piece))
            rows[2].append(inside[known] + np.repeat([len(each.before) for each in sides], 2))
    return AlignedRows(*rows, sides[1].pad, counts["unaligned"], counts["single"], counts["unknown"])


def split_spans(spans: np.ndarray, rooms: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Yields the start and end span of each piece, with as many spans as fit.

    Start and end are equal for a single span that doesn't fit, which is then skipped.

    Args:
        spans: Start and end token on both sides, without gaps [spans, 4].
        rooms: Maximum number of tokens per piece on each side.
    """
    first = 0
    while first < len(spans):
        fit = [np.searchsorted(spans[:, 2 * i + 1], spans[first, 2 * i] + rooms[i], "right") for i in (0, 1)]
        last = max(int(min(fit)), first)
        yield first, last
        first = max(last, first + 1)


def _contain_token(ids: np.ndarray, token: int | None, spans: np.ndarray) -> np.ndarray:
    """Returns for each span whether it contains the token, bool [spans]."""
    before = np.concatenate([[0], np.cumsum(ids == token)])
    contained: np.ndarray = before[spans[:, 1]] > before[spans[:, 0]]
    return contained


@dataclass(frozen=True)
class _Side:
    """A tokenizer, its special tokens, and the number of text tokens that fit into a row.

    Args:
        tokenizer: The tokenizer.
        before, after: Ids of the special tokens around a text.
        end, pad, unknown: Ids of the token after a text, of the padding, and of the unknown token.
        room: Maximum number of text tokens per row.
    """

    tokenizer: PreTrainedTokenizerBase
    before: np.ndarray
    after: np.ndarray
    end: int
    pad: int
    unknown: int | None
    room: int

    @classmethod
    def build(cls, tokenizer: PreTrainedTokenizerBase, length: int, name: str) -> "_Side":
        end = find_end_token(tokenizer)
        if end is None:
            raise InputError(
                f"tokenizer {type(tokenizer).__name__}: expected an eos or a sep token, found neither: "
                "no model could learn where a text ends"
            )
        before, after = (np.array(ids, np.int64) for ids in split_special_tokens(tokenizer))
        room = length - len(before) - len(after)
        if room < 2:
            raise InputError(
                f"{name}: expected at least {length - room + 2} tokens a row, found {length}: "
                "there would be no next token to predict"
            )
        pad = tokenizer.pad_token_id
        return cls(tokenizer, before, after, end, end if pad is None else pad, tokenizer.unk_token_id, room)

    def frame(self, ids: np.ndarray) -> np.ndarray:
        return np.concatenate([self.before, ids, self.after])

    def encode(self, texts: Sequence[str]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields the ids [tokens] and offsets [tokens, 2] of each text, without special tokens."""
        for start in range(0, len(texts), TEXTS_AT_ONCE):
            encoded = self.tokenizer(
                list(texts[start : start + TEXTS_AT_ONCE]),
                add_special_tokens=False,
                return_offsets_mapping=True,
                verbose=False,  # no warning about texts longer than the model's maximum: they are split later
            )
            for ids, offsets in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
                yield np.asarray(ids, np.int64), np.asarray(offsets, np.int64).reshape(-1, 2)
