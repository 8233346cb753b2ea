"""Masked texts for two masked language models with different tokenizers: the same spans are masked for both."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from distill.data.alignment.encoded import AlignedRows, padded_spans
from distill.data.batches.encode import IGNORED, Batch, padded, padded_tokens
from distill.data.masking.config import MaskConfig
from distill.data.masking.masks import check_draw, draws, to_regular_ids, to_uniform
from distill.errors import InputError

Seen = tuple[np.ndarray, np.ndarray]  # masked input ids, and positions to predict [length]


@dataclass(frozen=True)
class MaskFacts:
    """The properties of a tokenizer that masking needs; see `masked`."""

    mask_id: int
    vocabulary: int
    special: np.ndarray  # sorted, including the mask token

    @classmethod
    def build(cls, tokenizer: PreTrainedTokenizerBase) -> "MaskFacts":
        if tokenizer.mask_token_id is None:
            raise InputError(
                f"tokenizer {type(tokenizer).__name__}: expected a mask token, found none: no token could be hidden; "
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
    student: MaskFacts
    teacher: MaskFacts

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
        return cls(rows, config, MaskFacts.build(tokenizer), MaskFacts.build(teacher_tokenizer))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> np.ndarray:
        return self.rows.lengths

    @property
    def notes(self) -> dict[str, int]:
        return self.rows.notes

    def collate(self, rows: Sequence[int] | np.ndarray, pad_id: int, epoch: int = 0) -> Batch:
        """Masks the rows for `epoch` and pads them, [batch, length] each.

        input_ids (masked), attention_mask and labels (the true id at the positions, else IGNORED) are int64, positions
        is bool; the teacher's names are prefixed with `teacher_`. `spans` [batch, spans, 4] are the chosen spans, as
        start and end position of the student's and of the teacher's tokens; a span with equal start and end is padding.
        """
        made = [self._masked(int(i), epoch) for i in rows]
        batch = {"spans": padded_spans([spans for *_, spans in made])}
        originals = (self.rows.input_ids, self.rows.teacher_input_ids)
        for side, (before, pad) in enumerate((("", pad_id), ("teacher_", self.rows.teacher_pad_id))):
            seen, positions = ([each[side][part] for each in made] for part in (0, 1))
            labels = [np.where(asked, originals[side][i], IGNORED) for i, asked in zip(rows, positions, strict=True)]
            own = {"positions": padded(positions, 0).bool(), "labels": padded(labels, IGNORED)}
            batch |= {f"{before}{name}": value for name, value in (padded_tokens(seen, pad) | own).items()}
        return batch

    def _masked(self, row: int, epoch: int) -> tuple[Seen, Seen, np.ndarray]:
        ids, taught, spans = self.rows.input_ids[row], self.rows.teacher_input_ids[row], self.rows.spans[row]
        for facts in (self.student, self.teacher):
            check_draw(epoch, self.config, facts.mask_id, facts.vocabulary, facts.special)
        spans = spans[~np.isin(ids[spans[:, 0]], self.student.special)]
        number = epoch % self.config.passes
        words, other = (draws(each, number, self.config.seed) for each in (ids, taught))
        chosen, fate = chosen_spans(words[:, : len(spans)], self.config)
        return (
            mask_spans(ids, spans[chosen, :2], fate[chosen], words[2], self.student, self.config),
            mask_spans(taught, spans[chosen, 2:], fate[chosen], other[2], self.teacher, self.config),
            spans[chosen],
        )


def chosen_spans(words: np.ndarray, config: MaskConfig) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mask of chosen spans, each with probability `rate` (if none is chosen, the one with the smallest
    draw), and for every span the draw that decides how it is replaced.
    """
    distance = to_uniform(words[0])
    chosen = distance < config.rate
    if len(distance) and not chosen.any():
        chosen[distance.argmin()] = True
    return chosen, to_uniform(words[1])


def mask_spans(
    ids: np.ndarray, spans: np.ndarray, fate: np.ndarray, words: np.ndarray, facts: MaskFacts, config: MaskConfig
) -> Seen:
    """Returns the masked ids, with all tokens of a span replaced in the same way, and the positions to predict."""
    kind = np.ones(len(ids))
    positions = np.zeros(len(ids), bool)
    for (first, end), share in zip(spans, fate, strict=True):
        kind[first:end], positions[first:end] = share, True
    seen = ids.copy()
    seen[positions & (kind < config.replaced)] = facts.mask_id
    swapped = positions & (kind >= config.replaced) & (kind < config.replaced + config.random)
    seen[swapped] = to_regular_ids(words[swapped], facts.vocabulary, facts.special)
    return seen, positions
