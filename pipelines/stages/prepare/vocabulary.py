"""Tokenizers of pruned checkpoints, and cached signals for students with a reduced vocabulary."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from distill.checkpoint.custom_models import register_custom_classes
from distill.checkpoint.tokenizer import load_tokenizer
from distill.losses.teacher_signals import SignalSource, TeacherSignals

TOKENS_FILE = "token_ids.npy"  # ids of the teacher's tokens that the start stage retained


def load_student_tokenizer(folder: Path, role: str = "student") -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a stock or pruned checkpoint; a pruned model's classes are registered first."""
    register_custom_classes(folder)
    return load_tokenizer(folder, role)


class TranslatedSignals:
    """Signals for batches in the student's token ids: id i of the student is id `teacher_ids[i]` of the teacher.

    Valid for texts whose tokens were all retained, which includes every text that the cache was written for.

    Args:
        signals: Source of the signals, queried with the teacher's ids.
        teacher_ids: The teacher's ids of the retained tokens, ascending [tokens].
    """

    def __init__(self, signals: SignalSource, teacher_ids: np.ndarray):
        self.signals, self.teacher_ids = signals, torch.from_numpy(teacher_ids)

    def __call__(self, batch: Mapping[str, Tensor]) -> TeacherSignals:
        """Returns the signals for a batch of the student."""
        return self.signals({**batch, "input_ids": self.teacher_ids[batch["input_ids"]]})
