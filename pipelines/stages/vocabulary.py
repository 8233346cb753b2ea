"""Tokenizers of pruned checkpoints, and cached signals for students with a reduced vocabulary."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from distill.checkpoint.pruned import register_pruned
from distill.checkpoint.tokenizer import load_tokenizer
from distill.losses.teacher_signals import SignalSource, TeacherSignals

WORDS = "words.npy"


def tokenizer_of(folder: Path, role: str = "student") -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a stock or pruned checkpoint; a pruned model's classes are registered first."""
    register_pruned(folder)
    return load_tokenizer(folder, role)


class Translated:
    """Signals for batches in the student's token ids: id i of the student is id `words[i]` of the teacher.

    Valid for texts whose tokens were all kept, which includes every text that the cache was written for.

    Args:
        signals: Source of the signals, queried with the teacher's ids.
        words: The teacher's ids that were kept, ascending [tokens].
    """

    def __init__(self, signals: SignalSource, words: np.ndarray):
        self.signals, self.words = signals, torch.from_numpy(words)

    def __call__(self, batch: Mapping[str, Tensor]) -> TeacherSignals:
        return self.signals({**batch, "input_ids": self.words[batch["input_ids"]]})
