"""Masked texts for two masked language models with different tokenizers: the same spans are masked for both."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from distill.data.alignment.encoded import AlignedRows, pad_spans
from distill.data.batches.encode import Batch, pad_rows, pad_tokens
from distill.data.masking.config import MaskConfig
from distill.data.masking.masks import check_mask_inputs, draw_bits, to_regular_ids, to_uniform
from distill.errors import InputError
from distill.losses.logits import IGNORED

MaskedIds = tuple[np.ndarray, np.ndarray]  # masked input ids, and positions to predict [length]


@dataclass(frozen=True)
class MaskVocabulary:
    """The properties of a tokenizer that masking needs; see `mask_tokens`."""

    mask_id: int
    vocabulary: int
    special: np.ndarray  # sorted, including the mask token

    @classmethod
    def build(cls, tokenizer: PreTrainedTokenizerBase) -> "MaskVocabulary":
        """Returns the properties of a tokenizer.

        Raises:
            InputError: The tokenizer has no mask token.
        """
        if tokenizer.mask_token_id is None:
            raise InputError(
                f"tokenizer {type(tokenizer).__name__}: expected a mask token, found none: no token could be masked; "
                "it is not one of a masked language model"
            )
        return cls(int(tokenizer.mask_token_id), len(tokenizer), np.unique(tokenizer.all_special_ids))


@dataclass(frozen=True)
class MaskedAlignedRows:
    """Rows of `AlignedRows` whose batches have masks on whole spans.

    The predictions of the two models can only be compared on spans that are masked for both, and independent masks
    would seldom agree.
    """

    rows: AlignedRows
    config: MaskConfig
    student: MaskVocabulary
    teacher: MaskVocabulary

    @classmethod
    def build(
        cls,
        rows: AlignedRows,
        config: MaskConfig,
        tokenizer: PreTrainedTokenizerBase,
        teacher_tokenizer: PreTrainedTokenizerBase,
    ) -> "MaskedAlignedRows":
        """Creates masked rows with the mask tokens, vocabulary sizes and special ids of the tokenizers.

        Raises:
            InputError: A tokenizer has no mask token.
        """
        return cls(rows, config, MaskVocabulary.build(tokenizer), MaskVocabulary.build(teacher_tokenizer))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> np.ndarray:
        """Number of the student's tokens of each row, int64 [rows]."""
        return self.rows.lengths

    @property
    def notes(self) -> dict[str, int]:
        """The rows' counts of what was left out."""
        return self.rows.notes

    def collate(self, rows: Sequence[int] | np.ndarray, pad_id: int, epoch: int = 0) -> Batch:
        """Masks the rows for `epoch` and pads them, [batch, length] each.

        input_ids (masked), attention_mask and labels (the true id at the positions, else IGNORED) are int64, positions
        is bool; the teacher's names are prefixed with `teacher_`. `spans` [batch, spans, 4] are the chosen spans, as
        start and end position of the student's and of the teacher's tokens; a span with equal start and end is padding.
        """
        masked = [self._mask_row(int(i), epoch) for i in rows]
        batch = {"spans": pad_spans([spans for *_, spans in masked])}
        originals = (self.rows.input_ids, self.rows.teacher_input_ids)
        for side, (prefix, pad) in enumerate((("", pad_id), ("teacher_", self.rows.teacher_pad_id))):
            ids, positions = ([each[side][part] for each in masked] for part in (0, 1))
            labels = [np.where(mask, originals[side][i], IGNORED) for i, mask in zip(rows, positions, strict=True)]
            targets = {"positions": pad_rows(positions, 0).bool(), "labels": pad_rows(labels, IGNORED)}
            batch |= {f"{prefix}{name}": value for name, value in (pad_tokens(ids, pad) | targets).items()}
        return batch

    def _mask_row(self, row: int, epoch: int) -> tuple[MaskedIds, MaskedIds, np.ndarray]:
        """Returns the student's and the teacher's masked ids, and the chosen spans."""
        ids, teacher_ids, spans = self.rows.input_ids[row], self.rows.teacher_input_ids[row], self.rows.spans[row]
        for side in (self.student, self.teacher):
            check_mask_inputs(epoch, self.config, side.mask_id, side.vocabulary, side.special)
        spans = spans[~np.isin(ids[spans[:, 0]], self.student.special)]
        number = epoch % self.config.passes
        bits, teacher_bits = (draw_bits(each, number, self.config.seed) for each in (ids, teacher_ids))
        chosen, kinds = _choose_spans(bits[:, : len(spans)], self.config)
        return (
            _mask_spans(ids, spans[chosen, :2], kinds[chosen], bits[2], self.student, self.config),
            _mask_spans(teacher_ids, spans[chosen, 2:], kinds[chosen], teacher_bits[2], self.teacher, self.config),
            spans[chosen],
        )


def _choose_spans(bits: np.ndarray, config: MaskConfig) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mask of chosen spans, and for every span the draw that decides how it is replaced.

    Each span is chosen with probability `rate`; if none is, the one with the smallest draw is.
    """
    draw = to_uniform(bits[0])
    chosen = draw < config.rate
    if len(draw) and not chosen.any():
        chosen[draw.argmin()] = True
    return chosen, to_uniform(bits[1])


def _mask_spans(
    ids: np.ndarray,
    spans: np.ndarray,
    kinds: np.ndarray,
    bits: np.ndarray,
    vocabulary: MaskVocabulary,
    config: MaskConfig,
) -> MaskedIds:
    """Returns the masked ids, with all tokens of a span replaced in the same way, and the positions to predict."""
    kind = np.ones(len(ids))
    positions = np.zeros(len(ids), bool)
    for (first, end), draw in zip(spans, kinds, strict=True):
        kind[first:end], positions[first:end] = draw, True
    masked = ids.copy()
    masked[positions & (kind < config.replaced)] = vocabulary.mask_id
    randomized = positions & (kind >= config.replaced) & (kind < config.replaced + config.random)
    masked[randomized] = to_regular_ids(bits[randomized], vocabulary.vocabulary, vocabulary.special)
    return masked, positions
