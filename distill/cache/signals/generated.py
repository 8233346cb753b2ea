"""Sequences that the teacher wrote, with the probability of every token: sequence-level distillation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from distill.cache.signals.checks import check_finite
from distill.cache.signals.signal import Answer, Codebook, Row, Signal, Where
from distill.errors import InputError


@dataclass(frozen=True)
class Generated(Signal):
    """What the teacher goes on with after each prompt: 3 bytes an id and a float16 log-probability.

    Args:
        new_tokens: At most so many.
        temperature: 0 takes the likeliest token each time; above, tokens are drawn.
        seed: Of the drawing; each sample has its own stream.

    Source: Kim & Rush 2016, sequence-level knowledge distillation (arXiv 1606.07947), with one sequence a prompt
    instead of a beam.
    """

    kind: ClassVar[str] = "generated"
    needs: ClassVar[tuple[str, ...]] = ("generated",)
    new_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.new_tokens < 1 or self.temperature < 0:
            raise InputError(
                "cache: expected new_tokens of at least 1 and a temperature of at least 0, "
                f"found {self.new_tokens} and {self.temperature}"
            )
        if self.width > 1 << 24:
            raise InputError(f"cache: a vocabulary of {self.width} ids, which 3 bytes can't tell apart")

    def nominal_bytes(self) -> float:
        return 5.0

    def rows(self, answer: Answer) -> list[Row]:
        sequences, log_probs = answer.outputs["generated"]
        for log_prob, key in zip(log_probs, answer.keys, strict=True):
            check_finite("log-probabilities", log_prob[None].to(torch.float16), [key])
        return [
            (ids.to(torch.int32).cpu().numpy(), log_prob.to(torch.float16).cpu().numpy())
            for ids, log_prob in zip(sequences, log_probs, strict=True)
        ]

    def encode(self, row: Row, codebook: Codebook) -> bytes:
        ids, log_probs = row
        return ids.astype("<u4").view(np.uint8).reshape(-1, 4)[:, :3].tobytes() + log_probs.astype("<f2").tobytes()

    def decode(self, records: Sequence[memoryview], where: Where, codebook: Codebook) -> dict[str, Any]:
        """{"generated": (ids int64 [tokens] a sample, log-probabilities float32 [tokens] a sample)}."""
        sequences, log_probs = [], []
        for record in records:
            count, rest = divmod(len(record), 5)
            if rest or count > self.new_tokens:
                raise ValueError(f"{len(record)} bytes are no sequence of at most {self.new_tokens} tokens")
            wide = np.zeros((count, 4), np.uint8)
            wide[:, :3] = np.frombuffer(record[: 3 * count], np.uint8).reshape(count, 3)
            sequences.append(torch.from_numpy(wide.view("<u4")[:, 0].astype(np.int64)))
            log_probs.append(torch.from_numpy(np.frombuffer(record[3 * count :], "<f2").astype(np.float32)))
        return {"generated": (sequences, log_probs)}
