"""A student with fewer words than its teacher asks a cache that knows the teacher's ids."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from compress.prune.slicing.checkpoint import admit
from distill.checkpoint.tokenizer import load_tokenizer
from distill.data.batches.encode import Batch
from distill.train.module import Signals

WORDS = "words.npy"


def tokenizer_of(folder: Path, role: str = "student") -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint, stock or pruned; a pruned model's classes have to be known before it is read."""
    admit(folder)
    return load_tokenizer(folder, role)


class Translated:
    """Signals for batches in the student's ids: word i of the student is word `words[i]` of the teacher.

    Holds for texts none of whose words went, as all that the cache was written for.

    Args:
        signals: What answers for the teacher's ids.
        words: The teacher's ids that are left, rising [words].
    """

    def __init__(self, signals: Signals, words: np.ndarray):
        self.signals, self.words = signals, torch.from_numpy(words)

    def __call__(self, batch: Batch) -> Mapping[str, Any]:
        return self.signals({**batch, "input_ids": self.words[batch["input_ids"]]})
