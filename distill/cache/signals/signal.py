"""What a kind of signal has to say: how it is taken from the teacher's answer, coded, and given to a student."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from distill.cache.signals.rans import Table

Codebook = Mapping[str, Table]
Row = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Where:
    """Which places of a padded batch have signals.

    Args:
        tokens: bool [batch, length], True for what is no padding.
        positions: bool [batch, length], where distributions over the vocabulary are kept: all tokens, or for a masked
            language model the masked ones.
    """

    tokens: Tensor
    positions: Tensor

    @staticmethod
    def of(batch: Mapping[str, Tensor]) -> "Where":
        """`positions` may be in the batch; without it every token counts."""
        tokens = batch["attention_mask"].bool()
        return Where(tokens, batch["positions"].bool() & tokens if "positions" in batch else tokens)


@dataclass(frozen=True)
class Answer:
    """What the teacher said about a padded batch: tensors by name, where they count, and the samples' keys."""

    outputs: Mapping[str, Any]
    where: Where
    keys: Sequence[bytes]


@dataclass(frozen=True)
class Signal(ABC):
    """A kind of signal with its settings; equal settings mean equal signals.

    Args:
        width: Numbers a position: classes, words or channels.
    """

    kind: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ("logits",)
    width: int

    @property
    def name(self) -> str:
        """Names its part of a shard; a cache holds one signal of each name."""
        return self.kind

    def settings(self) -> dict[str, Any]:
        """Kind and fields, for the cache's identity; `signal_of` turns them back."""
        return {"kind": self.kind, **asdict(self)}

    @abstractmethod
    def nominal_bytes(self) -> float:
        """About how many bytes a token takes; decides how many tokens a shard holds."""

    @abstractmethod
    def rows(self, answer: Answer) -> list[Row]:
        """Arrays to be coded, one tuple a sample of the batch.

        Raises:
            InputError: The answer has another width, or numbers that are not finite.
        """

    def fit(self, rows: Sequence[Row]) -> dict[str, np.ndarray]:
        """Frequency tables (`rans.table`) that `encode` and `decode` share, fitted on a sample; none by default."""
        return {}

    @abstractmethod
    def encode(self, row: Row, codebook: Codebook) -> bytes:
        """One sample's record."""

    @abstractmethod
    def decode(self, records: Sequence[memoryview], where: Where, codebook: Codebook) -> dict[str, Any]:
        """Tensors of a batch.

        Raises:
            ValueError: A record that does not fit its sample.
        """


def at_positions(logits: Tensor, mask: Tensor) -> Tensor:
    """Rows [positions, width] of logits [batch, length, width] where the mask is set; no copy where it is all, nor of
    what are these rows already.
    """
    if logits.dim() == 2:
        return logits
    return logits.flatten(0, 1) if mask.all() else logits[mask]
