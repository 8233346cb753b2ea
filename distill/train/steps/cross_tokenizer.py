"""Distillation between a student and a teacher with different tokenizers."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from distill.data.alignment.encoded import select_teacher_inputs
from distill.data.alignment.tokens import shared_vocabulary
from distill.data.batches.encode import Batch
from distill.losses.config import LossConfig
from distill.losses.cross_tokenizer import cross_tokenizer_loss
from distill.losses.cross_tokenizer_config import CrossTokenizerConfig
from distill.losses.logits import label_loss
from distill.losses.teacher_signals import SignalSource
from distill.models.inputs import select_inputs
from distill.tasks.logit_rows import flatten_rows
from distill.train.steps.signals import check_signals


@dataclass(frozen=True)
class CrossTokenizerKL:
    """The distance from a teacher that tokenizes the same text differently.

    Args:
        teacher: Queried with a batch's texts in the teacher's own tokens.
        config: How the two models are compared.
        shared: Pairs of ids of tokens with the same spelling, int64 [shared, 2]; only for `spans`.
    """

    teacher: SignalSource
    config: CrossTokenizerConfig
    shared: Tensor | None

    @classmethod
    def from_tokenizers(
        cls,
        teacher: SignalSource,
        config: CrossTokenizerConfig,
        tokenizer: PreTrainedTokenizerBase,
        teacher_tokenizer: PreTrainedTokenizerBase,
    ) -> "CrossTokenizerKL":
        """Builds the term with the shared vocabulary of the two tokenizers, if `config` needs one."""
        pairs = shared_vocabulary(tokenizer, teacher_tokenizer) if config.kind == "spans" else None
        return cls(teacher, config, None if pairs is None else torch.from_numpy(pairs))

    def __call__(self, student_logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Returns `cross_tokenizer_loss` for the student's logits.

        Args:
            student_logits: Logits [batch, length, vocabulary].
            batch: From `AlignedRows` or `MaskedAlignedRows`.

        Raises:
            InputError: As in `check_signals` and `cross_tokenizer_loss`.
        """
        teacher_batch = select_teacher_inputs(dict(batch))
        signals = self.teacher(teacher_batch)
        check_signals(signals, teacher_batch)
        device = student_logits.device
        shared = None if self.shared is None else self.shared.to(device)
        return cross_tokenizer_loss(student_logits, signals["logits"].to(device), batch, self.config, shared)

    def compute_terms(self, student: PreTrainedModel, loss: LossConfig, batch: Batch) -> dict[str, Tensor]:
        """Returns the unweighted values of `kl` and `ce` on a batch, each if it has a weight at some time."""
        logits = student(**select_inputs(batch)).logits
        terms = {"kl": self(logits, batch)} if loss.computes("kl") else {}
        if loss.computes("ce"):
            terms["ce"] = label_loss(flatten_rows(batch, logits, 2), flatten_rows(batch, batch["labels"], 1))
        return terms
