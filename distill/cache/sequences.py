"""Prompts with what a teacher goes on with: rows for sequence-level distillation."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distill.cache.plan import BATCH_TOKENS, Samples, cut_batches
from distill.data.batches.encode import IGNORED, Batch, padded, padded_tokens
from distill.errors import InputError
from distill.tasks.logit_rows import facts_of


@dataclass(frozen=True)
class Sequences:
    """Prompts, each of at least one token, and their continuations: int64 [tokens] each.

    Batches ask for the continuations alone, by labels as by `positions`: cross-entropy learns them, and a term that
    reads a teacher's distributions does at the same places.

    Raises:
        InputError: Not as many of the one as of the other, or an empty prompt.
    """

    prompts: list[np.ndarray]
    continuations: list[np.ndarray]

    def __post_init__(self) -> None:
        if len(self.prompts) != len(self.continuations):
            raise InputError(
                f"sequences: expected a continuation for each prompt, found {len(self.continuations)} for "
                f"{len(self.prompts)}: texts would go on with others' endings"
            )
        if empty := sum(len(prompt) == 0 for prompt in self.prompts):
            raise InputError(
                f"sequences: expected prompts of at least one token, found {empty} empty ones: no position would be "
                "asked for the first token after them"
            )

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def lengths(self) -> np.ndarray:
        both = zip(self.prompts, self.continuations, strict=True)
        return np.fromiter((len(prompt) + len(new) for prompt, new in both), np.int64, len(self))

    @property
    def input_ids(self) -> list[np.ndarray]:
        """Prompt and continuation, int64 [length] each."""
        return [self.row(i) for i in range(len(self))]

    @property
    def positions(self) -> list[np.ndarray]:
        """Where the next token is one of the continuation, bool [length] each."""
        return [self.asked(i) for i in range(len(self))]

    def row(self, number: int) -> np.ndarray:
        return np.concatenate([self.prompts[number], self.continuations[number]]).astype(np.int64)

    def asked(self, number: int) -> np.ndarray:
        first, count = len(self.prompts[number]), len(self.continuations[number])
        place = np.arange(first + count)
        return (place >= first - 1) & (place < first + count - 1)

    def collate(self, rows: Sequence[int] | np.ndarray, pad_id: int, epoch: int = 0) -> Batch:
        """Pads the rows to the longest of them, [batch, length] each: input_ids, attention_mask and labels int64,
        positions bool.

        The label of a position is the token after it; where that is none of the continuation it is IGNORED.
        """
        ids, asked = [self.row(i) for i in rows], [self.asked(i) for i in rows]
        labels = [np.where(where, np.roll(row, -1), IGNORED) for row, where in zip(ids, asked, strict=True)]
        own = {"positions": padded(asked, 0).bool(), "labels": padded(labels, IGNORED)}
        return padded_tokens(ids, pad_id) | own


def teacher_sequences(
    signals: Callable[[Mapping[str, Tensor]], Mapping[str, Any]],
    prompts: Samples,
    *,
    batch_tokens: int = BATCH_TOKENS,
) -> Sequences:
    """What the teacher goes on with after each prompt, in the order of the prompts.

    Args:
        signals: A `CacheReader` on a cache of `Generated`, or `OnlineTeacher(model, ["generated"])`, which writes now.
        prompts: As `distill.cache.samples.samples_of` makes them, for the cache as for this.
        batch_tokens: Tokens of prompts, padding included, that are asked about at once.

    Raises:
        InputError: `signals` has no sequences, or not those of a prompt.

    Source: Kim & Rush 2016, sequence-level knowledge distillation (arXiv 1606.07947), section 3.2; the teacher's
    sequence is drawn or taken token by token, where they search with a beam.
    """
    order = np.argsort(prompts.lengths, kind="stable")
    begun, gone_on = ([np.zeros(0, np.int64)] * len(prompts) for _ in range(2))
    for cut in cut_batches(prompts.lengths[order], batch_tokens):
        rows = order[cut.start : cut.stop].tolist()
        batch = prompts.batch(rows)
        found = signals(batch)
        if "generated" not in found:
            kinds = ", ".join(sorted(set(found) - set(facts_of(found)))) or "nothing"
            raise InputError(
                f"sequences: expected a teacher's generated sequences, found {kinds}: "
                "there is nothing to go on with after a prompt"
            )
        for row, ids, mask, new in zip(
            rows, batch["input_ids"], batch["attention_mask"].bool(), found["generated"][0], strict=True
        ):
            begun[row], gone_on[row] = as_array(ids[mask]), as_array(new)
    return Sequences(begun, gone_on)


def as_array(ids: Tensor) -> np.ndarray:
    return ids.to("cpu", torch.int64).numpy()
