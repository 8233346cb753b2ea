"""The teacher's signals for a batch, computed by a teacher in memory or read from a cache."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypedDict

from torch import Tensor

AttentionVectors = tuple[Tensor, Tensor, Tensor]  # queries, keys and values of a layer, each [batch, length, width]


class TeacherSignals(TypedDict, total=False):
    """Signals by name; which of them are present depends on what was requested or cached.

    Attributes:
        logits: [batch, classes], [batch, length, classes], or rows [rows, classes].
        ids: Ids of a sample or of the most probable classes [rows, k].
        weights: Share of each id in a sample [rows, k].
        log_probs: Log-probabilities of the most probable classes in nats [rows, k].
        tail: Total probability of all other classes [rows].
        temperature: Temperature of a sample or top-k.
        classes: The teacher's number of classes, where they are a vocabulary that may be padded.
        embedding: Text vectors [batch, width].
        hidden: Hidden states by layer [batch, length, width], where 0 is the output of the embeddings.
        relations: Attention vectors by layer, where 0 is the first layer.
        generated: Token ids and log-probabilities of the generated sequences, one [tokens] tensor per sample.
    """

    logits: Tensor
    ids: Tensor
    weights: Tensor
    log_probs: Tensor
    tail: Tensor
    temperature: float
    classes: int
    embedding: Tensor
    hidden: Mapping[int, Tensor] | Sequence[Tensor]
    relations: Mapping[int, AttentionVectors] | Sequence[AttentionVectors]
    generated: tuple[list[Tensor], list[Tensor]]


SignalSource = Callable[[Mapping[str, Tensor]], TeacherSignals]  # a padded batch -> its signals
