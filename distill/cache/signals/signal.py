"""Interface of a kind of signal: extraction from the teacher's outputs, coding, and decoding into tensors."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from distill.cache.signals.rans import FrequencyTable
from distill.losses.teacher_signals import TeacherSignals

Codebook = Mapping[str, FrequencyTable]
SignalRow = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class SignalMask:
    """Places of a padded batch that have signals.

    Args:
        tokens: bool [batch, length], True for tokens that are not padding.
        positions: bool [batch, length], positions whose distributions over the vocabulary are stored: all tokens, or
            the masked ones for a masked language model.
    """

    tokens: Tensor
    positions: Tensor

    @staticmethod
    def from_batch(batch: Mapping[str, Tensor]) -> "SignalMask":
        """Reads the masks of a batch; without `positions` in the batch all tokens have signals."""
        tokens = batch["attention_mask"].bool()
        return SignalMask(tokens, batch["positions"].bool() & tokens if "positions" in batch else tokens)


@dataclass(frozen=True)
class TeacherOutputs:
    """The teacher's outputs for a padded batch: tensors by name, the places with signals, and the samples' keys."""

    tensors: TeacherSignals
    mask: SignalMask
    keys: Sequence[bytes]


@dataclass(frozen=True)
class Signal(ABC):
    """A kind of signal with its settings; equal settings mean equal signals.

    Args:
        width: Numbers per position: classes, tokens of the vocabulary or channels.
    """

    kind: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ("logits",)
    width: int

    @property
    def name(self) -> str:
        """Prefix of the signal's arrays in a shard, unique within a cache."""
        return self.kind

    def settings(self) -> dict[str, object]:
        """Returns kind and fields for the cache's identity; `build_signal` is the inverse."""
        return {"kind": self.kind, **asdict(self)}

    @abstractmethod
    def nominal_bytes(self) -> float:
        """Returns the approximate bytes per token, which determine how many tokens a shard holds."""

    @abstractmethod
    def rows(self, outputs: TeacherOutputs) -> list[SignalRow]:
        """Returns the arrays to code, one tuple per sample of the batch.

        Raises:
            InputError: The outputs have another width, or numbers that are not finite.
        """

    def fit(self, rows: Sequence[SignalRow]) -> dict[str, np.ndarray]:
        """Returns frequency tables (`rans.build_table`) for `encode` and `decode`, fitted on a sample, or none."""
        return {}

    @abstractmethod
    def encode(self, row: SignalRow, codebook: Codebook) -> bytes:
        """Returns the record of one sample."""

    @abstractmethod
    def decode(self, records: Sequence[memoryview], mask: SignalMask, codebook: Codebook) -> TeacherSignals:
        """Returns the tensors of a batch.

        Raises:
            ValueError: A record doesn't fit its sample.
        """


def at_positions(logits: Tensor, mask: Tensor) -> Tensor:
    """Returns the rows [positions, width] of logits [batch, length, width] where the mask is set.

    Nothing is copied if the mask is set everywhere, or if the logits are these rows already.
    """
    if logits.dim() == 2:
        return logits
    return logits.flatten(0, 1) if mask.all() else logits[mask]
