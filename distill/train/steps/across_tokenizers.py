"""Distillation between a student and a teacher with different tokenizers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from distill.data.alignment.encoded import teacher_inputs
from distill.data.alignment.tokens import shared_vocabulary
from distill.losses.across import across_loss
from distill.losses.across_config import AcrossConfig
from distill.train.steps.signals import check_signals

Teacher = Callable[[Mapping[str, Tensor]], Mapping[str, Any]]


@dataclass(frozen=True)
class CrossTokenizerKL:
    """The distance from a teacher that tokenizes the same text differently.

    Args:
        teacher: Queried with a batch's texts in the teacher's own tokens.
        config: How the two models are compared.
        shared: Pairs of ids of tokens with the same spelling, int64 [shared, 2]; only for `spans`.
    """

    teacher: Teacher
    config: AcrossConfig
    shared: Tensor | None

    @classmethod
    def of(
        cls,
        teacher: Teacher,
        config: AcrossConfig,
        tokenizer: PreTrainedTokenizerBase,
        teacher_tokenizer: PreTrainedTokenizerBase,
    ) -> "CrossTokenizerKL":
        pairs = shared_vocabulary(tokenizer, teacher_tokenizer) if config.kind == "spans" else None
        return cls(teacher, config, None if pairs is None else torch.from_numpy(pairs))

    def __call__(self, student_logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Returns `across_loss` of the student's logits [batch, length, vocabulary] on a batch of `AlignedRows` or
        `MaskedAlignedRows`.
        """
        asked = teacher_inputs(dict(batch))
        signals = self.teacher(asked)
        check_signals(signals, asked)
        given = signals["logits"]
        shared = None if self.shared is None else self.shared.to(student_logits.device)
        return across_loss(student_logits, given.to(student_logits.device), batch, self.config, shared)
