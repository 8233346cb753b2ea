"""Settings of the losses between models with different tokenizers."""

from dataclasses import dataclass
from typing import Literal, get_args

from distill.errors import InputError

CrossTokenizerKind = Literal["spans", "sorted"]


@dataclass(frozen=True)
class CrossTokenizerConfig:
    """Loss between a student and a teacher with different tokenizers.

    Args:
        kind: `spans` compares shared tokens one by one and the probabilities of the others in sorted order; `sorted`
            compares sorted distributions only, which needs no shared vocabulary but loss.ce too: it conveys how
            confident the teacher is, not in which tokens.
        beta: For `spans`: the teacher's share of the Jensen-Shannon mixture on shared tokens; 0 is the forward KL.
        shared_weight: For `spans`: weight of the shared tokens; the sorted rest has 1 - shared_weight.
        temperature: Softens both distributions; the loss is scaled by its square.
    """

    kind: CrossTokenizerKind = "spans"
    beta: float = 0.0
    shared_weight: float = 0.8
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(CrossTokenizerKind):
            raise InputError(
                f"cross_tokenizer.kind: expected {' or '.join(get_args(CrossTokenizerKind))}, found {self.kind!r}"
            )
        if not 0 <= self.beta < 1:
            raise InputError(
                f"cross_tokenizer.beta: expected a share from 0 (forward KL) to below 1, found {self.beta}: at 1 "
                "nothing of the student would be compared with the teacher"
            )
        if not 0 <= self.shared_weight <= 1:
            raise InputError(
                f"cross_tokenizer.shared_weight: expected a share from 0 to 1, found {self.shared_weight}: "
                "one of the two parts would be driven away from the teacher"
            )
        if not self.temperature > 0:
            raise InputError(
                f"cross_tokenizer.temperature: expected more than 0, found {self.temperature}: logits are divided by it"
            )
