"""Hidden states and attention queries, keys and values at 8 bits, for feature distillation without a loaded teacher."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from distill.cache.signals.checks import check_finite, check_width
from distill.cache.signals.signal import Codebook, Row, Signal, SignalMask, TeacherOutputs
from distill.errors import InputError
from distill.losses.teacher_signals import TeacherSignals

LIMIT = 127


@dataclass(frozen=True)
class Features(Signal):
    """int8 values with one float32 scale per token and tensor: value = scale · integer, the largest becomes 127.

    Args:
        layers: Numbers of the teacher's layers.
    """

    tensors_a_layer: ClassVar[int]
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))  # JSON has no tuples, only lists
        if not self.layers or len(set(self.layers)) < len(self.layers) or min(self.layers) < 0:
            raise InputError(f"cache.layers: expected different layer numbers from 0 on, found {list(self.layers)}")

    @property
    def widths(self) -> tuple[int, ...]:
        """Width of every tensor, layer by layer."""
        return (self.width,) * (self.tensors_a_layer * len(self.layers))

    def nominal_bytes(self) -> float:
        return sum(self.widths) + 4 * len(self.widths)

    @staticmethod
    def parts(layer: Any) -> tuple[Any, ...]:
        """Returns the tensors of one layer."""
        raise NotImplementedError

    def tensors(self, outputs: TeacherOutputs) -> list[Tensor]:
        """Returns every tensor [batch, length, width], layer by layer."""
        found = outputs.tensors[self.needs[0]]
        return [part for layer in self.layers for part in self.parts(found[layer])]

    def rows(self, outputs: TeacherOutputs) -> list[Row]:
        mask, tensors = outputs.mask.tokens, self.tensors(outputs)
        for tensor, width in zip(tensors, self.widths, strict=True):
            check_width(self.kind, tensor, width)
        found = [tensor[mask].float() for tensor in tensors]  # each [tokens, width]
        check_finite(self.kind, torch.cat(found, -1), outputs.keys)
        scales = torch.stack([each.abs().amax(-1) for each in found], -1) / LIMIT
        scales = scales.clamp(min=torch.finfo(torch.float32).tiny)
        rounded = [(each / scale[:, None]).round() for each, scale in zip(found, scales.unbind(-1), strict=True)]
        values = torch.cat(rounded, -1).to(torch.int8)
        lengths = mask.sum(1).tolist()
        parts = zip(scales.cpu().split(lengths), values.cpu().split(lengths), strict=True)
        return [(scale.numpy(), value.numpy()) for scale, value in parts]

    def encode(self, row: Row, codebook: Codebook) -> bytes:
        scales, values = row
        return scales.astype("<f4").tobytes() + values.tobytes()

    def decode_flat(self, records: Sequence[memoryview], mask: SignalMask) -> list[Tensor]:
        """Returns every tensor [batch, length, width] in float32, with 0 in the padding."""
        lengths = mask.tokens.sum(1).tolist()
        count, names, width = sum(lengths), len(self.widths), sum(self.widths)
        scales, values = np.empty((count, names), np.float32), np.empty((count, width), np.int8)
        first = 0
        for record, length in zip(records, lengths, strict=True):
            cut, part = 4 * length * names, slice(first, first + length)
            scales[part] = np.frombuffer(record[:cut], "<f4").reshape(length, names)
            values[part] = np.frombuffer(record[cut:], np.int8).reshape(length, width)
            first += length
        found, tokens = [], mask.tokens.cpu()
        for i, each in enumerate(np.split(values, np.cumsum(self.widths)[:-1], 1)):
            # NumPy: this runs on a background thread during training, where PyTorch would start threads of its own.
            out = torch.zeros(*tokens.shape, self.widths[i])
            out[tokens] = torch.from_numpy(each * scales[:, i : i + 1])
            found.append(out)
        return found


@dataclass(frozen=True)
class Hidden(Features):
    """Hidden states of selected layers: 0 is the embeddings' output, the highest number the last layer's."""

    kind: ClassVar[str] = "hidden"
    tensors_a_layer: ClassVar[int] = 1
    needs: ClassVar[tuple[str, ...]] = ("hidden",)

    @staticmethod
    def parts(layer: Any) -> tuple[Any, ...]:
        return (layer,)

    def decode(self, records: Sequence[memoryview], mask: SignalMask, codebook: Codebook) -> TeacherSignals:
        """Returns {"hidden": {layer: [batch, length, width]}}."""
        return {"hidden": dict(zip(self.layers, self.decode_flat(records, mask), strict=True))}


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
    tensors_a_layer: ClassVar[int] = 3
    needs: ClassVar[tuple[str, ...]] = ("relations",)
    shared: int = 0

    @classmethod
    def from_widths(cls, widths: tuple[int, int, int], layers: Sequence[int]) -> Self:
        """Builds the signal from the widths of queries, keys and values."""
        queries, keys, _ = widths
        return cls(queries, tuple(layers), keys if keys != queries else 0)

    @property
    def widths(self) -> tuple[int, ...]:
        others = self.shared or self.width
        return (self.width, others, others) * len(self.layers)

    def settings(self) -> dict[str, Any]:
        """Omits `shared` if it is 0, so that existing caches keep their identity."""
        return {name: value for name, value in super().settings().items() if name != "shared" or value}

    @staticmethod
    def parts(layer: Any) -> tuple[Any, ...]:
        return tuple(layer)

    def decode(self, records: Sequence[memoryview], mask: SignalMask, codebook: Codebook) -> TeacherSignals:
        """Returns {"relations": {layer: (query, key, value)}}, each [batch, length, width]."""
        flat = self.decode_flat(records, mask)
        parts = zip(self.layers, flat[::3], flat[1::3], flat[2::3], strict=True)
        return {"relations": {layer: (query, key, value) for layer, query, key, value in parts}}
