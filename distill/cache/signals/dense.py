"""Dense values without compression: logits over few classes, or sentence embeddings."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch

from distill.cache.signals.checks import check_finite_values, check_width
from distill.cache.signals.signal import Codebook, Signal, SignalMask, SignalRow, TeacherOutputs, at_positions
from distill.errors import InputError
from distill.losses.teacher_signals import TeacherSignals


@dataclass(frozen=True)
class Dense(Signal):
    """One row of numbers per sample or per position.

    Args:
        of: `logits` or `embedding`.
        each: `sample` or `position`.
        dtype: `float32` is exact, `float16` takes half the space.
    """

    kind: ClassVar[str] = "dense"
    of: Literal["logits", "embedding"] = "logits"
    each: Literal["sample", "position"] = "sample"
    dtype: Literal["float32", "float16"] = "float32"

    def __post_init__(self) -> None:
        for name, allowed in (("each", ("sample", "position")), ("dtype", ("float32", "float16"))):
            if getattr(self, name) not in allowed:
                raise InputError(f"keep.{name}: expected {' or '.join(allowed)}, found {getattr(self, name)!r}")

    @property
    def name(self) -> str:
        """Prefix of the signal's arrays: the teacher's output that it stores."""
        return self.of

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        """The teacher's output that the signal stores."""
        return (self.of,)

    def nominal_bytes(self) -> float:
        """Returns the bytes per sample or position."""
        return self.width * np.dtype(self.dtype).itemsize

    def rows(self, outputs: TeacherOutputs) -> list[SignalRow]:
        """Returns the values of each sample, [width] or [positions, width]."""
        output = outputs.tensors["logits"] if self.of == "logits" else outputs.tensors["embedding"]
        # Cast before the check: values beyond the range of float16 become infinite.
        values, mask = output.to(getattr(torch, self.dtype)), outputs.mask.positions
        check_width(self.of, values, self.width)
        values = values if self.each == "sample" else at_positions(values, mask)
        check_finite_values(self.of, values, outputs.keys)
        counts = [1] * len(values) if self.each == "sample" else mask.sum(1).tolist()
        parts = values.cpu().split(counts)
        return [(part[0].numpy() if self.each == "sample" else part.numpy(),) for part in parts]

    def encode(self, row: SignalRow, codebook: Codebook) -> bytes:
        """Returns the bytes of the values."""
        return np.ascontiguousarray(row[0]).tobytes()

    def decode(self, records: Sequence[memoryview], mask: SignalMask, codebook: Codebook) -> TeacherSignals:
        """Returns the values under the name `of`: [batch, width], or [positions, width] in the order of the batch."""
        counts = [1] * len(records) if self.each == "sample" else mask.positions.sum(1).tolist()
        decoded = np.empty((sum(counts), self.width), self.dtype)
        first = 0
        for record, count in zip(records, counts, strict=True):
            decoded[first : first + count] = np.frombuffer(record, self.dtype).reshape(count, self.width)
            first += count
        values = torch.from_numpy(decoded).float()
        return {"logits": values} if self.of == "logits" else {"embedding": values}
