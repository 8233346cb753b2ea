"""Hidden states and attention's queries, keys and values at 8 bits, so that features are learnt with no teacher."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from distill.errors import InputError
from distill.teacher.cache.signals.checks import check_finite, check_width
from distill.teacher.cache.signals.signal import Answer, Codebook, Row, Signal, Where

LIMIT = 127


@dataclass(frozen=True)
class Features(Signal):
    """int8 values with one float32 scale a token and layer: value = scale · integer, the largest becomes 127.

    Args:
        layers: Which layers of the teacher.
    """

    tensors_a_layer: ClassVar[int]
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))  # JSON knows lists only
        if not self.layers or len(set(self.layers)) < len(self.layers) or min(self.layers) < 0:
            raise InputError(f"cache.layers: expected different layer numbers from 0 on, found {list(self.layers)}")

    def nominal_bytes(self) -> float:
        return self.tensors_a_layer * len(self.layers) * (self.width + 4)

    @staticmethod
    def parts(layer: Any) -> tuple[Any, ...]:
        """The tensors of one layer."""
        raise NotImplementedError

    def tensors(self, answer: Answer) -> list[Tensor]:
        """Every tensor [batch, length, width], layer by layer."""
        found = answer.outputs[self.needs[0]]
        return [part for layer in self.layers for part in self.parts(found[layer])]

    def rows(self, answer: Answer) -> list[Row]:
        mask, tensors = answer.where.tokens, self.tensors(answer)
        for tensor in tensors:  # grouped-query attention has narrower keys and values
            check_width(self.kind, tensor, self.width)
        flat = torch.stack([tensor[mask].float() for tensor in tensors], 1)  # [tokens, tensors, width]
        check_finite(self.kind, flat, answer.keys)
        scales = (flat.abs().amax(-1) / LIMIT).clamp(min=torch.finfo(torch.float32).tiny)
        values = (flat / scales[..., None]).round().to(torch.int8)
        lengths = mask.sum(1).tolist()
        parts = zip(scales.cpu().split(lengths), values.cpu().split(lengths), strict=True)
        return [(scale.numpy(), value.numpy()) for scale, value in parts]

    def encode(self, row: Row, codebook: Codebook) -> bytes:
        scales, values = row
        return scales.astype("<f4").tobytes() + values.tobytes()

    def decode_flat(self, records: Sequence[memoryview], where: Where) -> list[Tensor]:
        """Every tensor [batch, length, width] float32, 0 in the padding."""
        lengths = where.tokens.sum(1).tolist()
        count = sum(lengths)
        names = self.tensors_a_layer * len(self.layers)
        scales, values = np.empty((count, names), np.float32), np.empty((count, names, self.width), np.int8)
        first = 0
        for record, length in zip(records, lengths, strict=True):
            cut, part = 4 * length * names, slice(first, first + length)
            scales[part] = np.frombuffer(record[:cut], "<f4").reshape(length, names)
            values[part] = np.frombuffer(record[cut:], np.int8).reshape(length, names, self.width)
            first += length
        # NumPy: this runs on a thread beside training, where PyTorch would start threads of its own.
        flat = torch.from_numpy(values * scales[..., None])
        out = torch.zeros(names, *where.tokens.shape, self.width)
        out[:, where.tokens.cpu()] = flat.transpose(0, 1)
        return list(out)


@dataclass(frozen=True)
class Hidden(Features):
    """Hidden states of chosen layers: 0 is the embeddings' output, the last the last layer's."""

    kind: ClassVar[str] = "hidden"
    tensors_a_layer: ClassVar[int] = 1
    needs: ClassVar[tuple[str, ...]] = ("hidden",)

    @staticmethod
    def parts(layer: Any) -> tuple[Any, ...]:
        return (layer,)

    def decode(self, records: Sequence[memoryview], where: Where, codebook: Codebook) -> dict[str, Any]:
        """{"hidden": {layer: [batch, length, width]}}."""
        return {"hidden": dict(zip(self.layers, self.decode_flat(records, where), strict=True))}


@dataclass(frozen=True)
class Relations(Features):
    """Queries, keys and values of chosen layers (0 is the first), from which relations of any number of heads follow.

    A relation matrix takes heads · length numbers a token and fixes the number of heads; the vectors it is made of
    take 3 · width.

    Source: Wang et al. 2021, MiniLMv2 (arXiv 2012.15828), section 3.1.
    """

    kind: ClassVar[str] = "relations"
    tensors_a_layer: ClassVar[int] = 3
    needs: ClassVar[tuple[str, ...]] = ("relations",)

    @staticmethod
    def parts(layer: Any) -> tuple[Any, ...]:
        return tuple(layer)

    def decode(self, records: Sequence[memoryview], where: Where, codebook: Codebook) -> dict[str, Any]:
        """{"relations": {layer: (query, key, value)}}, each [batch, length, width]."""
        flat = self.decode_flat(records, where)
        return {"relations": {layer: tuple(flat[3 * i : 3 * i + 3]) for i, layer in enumerate(self.layers)}}
