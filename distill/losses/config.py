"""Which objectives, with what weight."""

import re
from dataclasses import dataclass
from typing import Literal

from distill.errors import InputError

TERMS = ("kl", "ce", "hidden")
DYNAMIC = "dynamic"


@dataclass(frozen=True)
class LossConfig:
    """Weights of the terms; a term of weight 0 is not computed.

    Args:
        kl: Weight of the KL divergence from the teacher's softened distribution.
        ce: Weight of the cross-entropy with the labels.
        hidden: Weight of the distance between hidden states.
        temperature: Softens both distributions of `kl`; the term is scaled by its square.
        hidden_kind: `mse` or `cosine`.
        layer_map: `uniform`, `last`, pairs student:teacher such as `0:0,2:6` (0 is the embeddings), or `dynamic`:
            in each step every layer of the student is matched to the nearest of the teacher's, in rising order.
    """

    kl: float = 1.0
    ce: float = 0.0
    hidden: float = 0.0
    temperature: float = 2.0
    hidden_kind: Literal["mse", "cosine"] = "mse"
    layer_map: str = "uniform"

    def __post_init__(self) -> None:
        weights = {name: getattr(self, name) for name in TERMS}
        if any(weight < 0 for weight in weights.values()) or not sum(weights.values()) > 0:
            raise InputError(f"loss: expected weights >= 0 with a sum > 0, found {weights}: nothing would be learnt")
        if not self.temperature > 0:
            raise InputError(
                f"loss.temperature: expected more than 0, found {self.temperature}: logits are divided by it"
            )
        if self.hidden_kind not in ("mse", "cosine"):
            raise InputError(f"loss.hidden_kind: expected mse or cosine, found {self.hidden_kind!r}")
        named = self.layer_map in ("uniform", "last", DYNAMIC)
        if not named and not re.fullmatch(r"\d+:\d+(,\d+:\d+)*", self.layer_map):
            raise InputError(
                f"loss.layer_map: expected uniform, last, dynamic or pairs like 0:0,2:6, found {self.layer_map!r}"
            )

    @property
    def needs_teacher(self) -> bool:
        """Whether any term reads a teacher at all."""
        return self.kl > 0 or self.hidden > 0

    @property
    def teacher_answers(self) -> tuple[str, ...]:
        """What the terms read of the teacher."""
        return ("logits",) * (self.kl > 0) + ("hidden",) * (self.hidden > 0)


def layer_pairs(layer_map: str, student_layers: int, teacher_layers: int) -> list[tuple[int, int]]:
    """Pairs (student, teacher) of hidden-state numbers; 0 is the embeddings' output, the last the last layer's.

    Of `dynamic` they are all that can be matched: 0 with 0, and layer i with every layer that leaves i - 1 of the
    teacher's below it and enough above it for the layers that follow. Among them is every layer of the teacher.

    Raises:
        InputError: A pair names a layer that isn't there, or the teacher has too few layers for a rising order.
    """
    if layer_map == "last":
        return [(student_layers, teacher_layers)]
    if layer_map == "uniform":
        return [(i, round(i * teacher_layers / student_layers)) for i in range(student_layers + 1)]
    if layer_map == DYNAMIC:
        spare = teacher_layers - student_layers
        if spare < 0:
            raise InputError(
                f"loss.layer_map dynamic: expected at most {teacher_layers} student layers, the teacher's, found "
                f"{student_layers}: each is matched to a higher layer than the one before; use uniform"
            )
        return [(0, 0), *((i, i + k) for i in range(1, student_layers + 1) for k in range(spare + 1))]
    pairs = [(int(s), int(t)) for s, t in (pair.split(":") for pair in layer_map.split(","))]
    for s, t in pairs:
        if s > student_layers or t > teacher_layers:
            raise InputError(
                f"loss.layer_map: pair {s}:{t} is out of range: the student has layers 0 to {student_layers}, "
                f"the teacher 0 to {teacher_layers} (0 is the embeddings)"
            )
    return pairs
