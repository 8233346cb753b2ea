"""Hidden states and attention queries, keys and values at 8 bits, for feature distillation without a loaded teacher."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from distill.cache.signals.checks import check_finite_values, check_width
from distill.cache.signals.signal import Codebook, Signal, SignalMask, SignalRow, TeacherOutputs
from distill.errors import InputError
from distill.losses.teacher_signals import TeacherSignals

LIMIT = 127


@dataclass(frozen=True)
class Features(Signal):
    """int8 values with one float32 scale per token and tensor: value = scale · integer, the largest becomes 127.

    Args:
        layers: Numbers of the teacher's layers.
    """

    tensors_per_layer: ClassVar[int]
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.layers or len(set(self.layers)) < len(self.layers) or min(self.layers) < 0:
            raise InputError(f"keep.layers: expected distinct layer numbers of at least 0, found {list(self.layers)}")

    @property
    def widths(self) -> tuple[int, ...]:
        """Width of every tensor, layer by layer."""
        return (self.width,) * (self.tensors_per_layer * len(self.layers))

    def nominal_bytes(self) -> float:
        """Returns the bytes per token."""
        return sum(self.widths) + 4 * len(self.widths)

    @abstractmethod
    def tensors(self, outputs: TeacherOutputs) -> list[Tensor]:
        """Returns every tensor [batch, length, width], layer by layer."""

    def rows(self, outputs: TeacherOutputs) -> list[SignalRow]:
        """Returns scales float32 [tokens, tensors] and values int8 [tokens, sum of the widths]."""
        mask, tensors = outputs.mask.tokens, self.tensors(outputs)
        for tensor, width in zip(tensors, self.widths, strict=True):
            check_width(self.kind, tensor, width)
        features = [tensor[mask].float() for tensor in tensors]  # each [tokens, width]
        check_finite_values(self.kind, torch.cat(features, -1), outputs.keys)
        scales = torch.stack([each.abs().amax(-1) for each in features], -1) / LIMIT
        scales = scales.clamp(min=torch.finfo(torch.float32).tiny)
        rounded = [(each / scale[:, None]).round() for each, scale in zip(features, scales.unbind(-1), strict=True)]
        values = torch.cat(rounded, -1).to(torch.int8)
        lengths = mask.sum(1).tolist()
        parts = zip(scales.cpu().split(lengths), values.cpu().split(lengths), strict=True)
        return [(scale.numpy(), value.numpy()) for scale, value in parts]

    def encode(self, row: SignalRow, codebook: Codebook) -> bytes:
        """Returns the bytes of the scales, then those of the values."""
        scales, values = row
        return scales.astype("<f4").tobytes() + values.tobytes()

    def decode_tensors(self, records: Sequence[memoryview], mask: SignalMask) -> list[Tensor]:
        """Returns every tensor [batch, length, width] in float32, with 0 in the padding."""
        lengths = mask.tokens.sum(1).tolist()
        count, tensors, width = sum(lengths), len(self.widths), sum(self.widths)
        scales, values = np.empty((count, tensors), np.float32), np.empty((count, width), np.int8)
        first = 0
        for record, length in zip(records, lengths, strict=True):
            split, part = 4 * length * tensors, slice(first, first + length)
            scales[part] = np.frombuffer(record[:split], "<f4").reshape(length, tensors)
            values[part] = np.frombuffer(record[split:], np.int8).reshape(length, width)
            first += length
        decoded, tokens = [], mask.tokens.cpu()
        for i, each in enumerate(np.split(values, np.cumsum(self.widths)[:-1], 1)):
            # NumPy: this runs on a background thread during training, where PyTorch would start threads of its own.
            tensor = torch.zeros(*tokens.shape, self.widths[i])
            tensor[tokens] = torch.from_numpy(each * scales[:, i : i + 1])
            decoded.append(tensor)
        return decoded


@dataclass(frozen=True)
class Hidden(Features):
    """Hidden states of selected layers: 0 is the embeddings' output, the highest number the last layer's."""

    kind: ClassVar[str] = "hidden"
    tensors_per_layer: ClassVar[int] = 1
    needs: ClassVar[tuple[str, ...]] = ("hidden",)

    def tensors(self, outputs: TeacherOutputs) -> list[Tensor]:
        """Returns the hidden states of each layer."""
        return [outputs.tensors["hidden"][layer] for layer in self.layers]

    def decode(self, records: Sequence[memoryview], mask: SignalMask, codebook: Codebook) -> TeacherSignals:
        """Returns {"hidden": {layer: [batch, length, width]}}."""
        return {"hidden": dict(zip(self.layers, self.decode_tensors(records, mask), strict=True))}


@dataclass(frozen=True)
class Relations(Features):
    """Queries, keys and values of selected layers (0 is the first), to compute relations with any number of heads.

    A relation matrix takes heads · length numbers per token and fixes the number of heads; the vectors that it is
    computed from take 3 · width.

    Args:
        width: Width of the queries.
        shared: Width of the keys and of the values if heads share them; 0: that of the queries.

    Source: Wang et al. 2021, MiniLMv2 (arXiv 2012.15828), section 3.1.
    """

    kind: ClassVar[str] = "relations"
    tensors_per_layer: ClassVar[int] = 3
    needs: ClassVar[tuple[str, ...]] = ("relations",)
    shared: int = 0

    @classmethod
    def from_widths(cls, widths: tuple[int, int, int], layers: Sequence[int]) -> Self:
        """Builds the signal from the widths of queries, keys and values."""
        queries, keys, _ = widths
        return cls(queries, tuple(layers), keys if keys != queries else 0)

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths of queries, keys and values, layer by layer."""
        others = self.shared or self.width
        return (self.width, others, others) * len(self.layers)

    def settings(self) -> dict[str, object]:
        """Omits `shared` if it is 0, so that existing caches keep their identity."""
        return {name: value for name, value in super().settings().items() if name != "shared" or value}

    def tensors(self, outputs: TeacherOutputs) -> list[Tensor]:
        """Returns the queries, keys and values of each layer."""
        return [vectors for layer in self.layers for vectors in outputs.tensors["relations"][layer]]

    def decode(self, records: Sequence[memoryview], mask: SignalMask, codebook: Codebook) -> TeacherSignals:
        """Returns {"relations": {layer: (query, key, value)}}, each [batch, length, width]."""
        flat = self.decode_tensors(records, mask)
        parts = zip(self.layers, flat[::3], flat[1::3], flat[2::3], strict=True)
        return {"relations": {layer: (query, key, value) for layer, query, key, value in parts}}
