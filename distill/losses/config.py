"""Settings of the objectives and their weights, and the pairs of layers that they compare."""

import re
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from distill.errors import InputError

TERMS = ("kl", "ce", "hidden", "attention", "relations", "embedding", "similarity")
DIVERGENCES = (
    "forward_kl", "reverse_kl", "jensen_shannon", "skewed_kl", "skewed_reverse_kl", "total_variation",
    "soft_cross_entropy", "decoupled_kl", "logit_mse", "logit_cosine",
)  # fmt: skip
OF_PART = ("forward_kl", "soft_cross_entropy")  # for which a sample or the likeliest classes are sufficient
DEFAULT_TEMPERATURE = 2.0
DYNAMIC = "dynamic"
LEARNED = "learned"
MAPS = ("uniform", "skip", "last", DYNAMIC, LEARNED)


@dataclass(frozen=True)
class LossConfig:
    """Weights and settings of the loss terms; a term of weight 0 is not computed.

    Args:
        kl: Weight of the distance from the teacher's softened distribution; the KL divergence unless `divergence` names
            another.
        ce: Weight of the cross-entropy with the labels.
        hidden: Weight of the distance between hidden states.
        attention: Weight of the distance between attention scores; teacher and student need the same number of heads.
        relations: Weight of the KL between relations of queries, keys and values (MiniLMv2).
        embedding: Weight of the distance from the teacher's vector of a text; the vector of a narrower student is
            projected to the teacher's width by a map that isn't part of the result.
        similarity: Weight of the distance between the student's and the teacher's cosines of every two texts of a batch
            (of each process's share of it).
        temperature: Softens both distributions of `kl`; the term is scaled by its square. If left out it is 2, or 1 in
            a run on a language model (`pipelines.settings.task_settings.resolve_task`): over its vocabulary there is
            little left to learn at 2.
        divergence: Divergence of `kl`: forward_kl, reverse_kl, jensen_shannon, skewed_kl, skewed_reverse_kl,
            total_variation, soft_cross_entropy, decoupled_kl (DKD, needs labels), logit_mse or logit_cosine.
        beta: The teacher's share of jensen_shannon's mixture.
        skew: The share of the first distribution that skewed_kl mixes into the second.
        decoupled: Weights of decoupled_kl's two parts: the label against the rest, and within the rest.
        hidden_kind: `mse`, `cosine`, or `normalized_mse` (of vectors of length 1, patient KD).
        attention_kind: `mse` of scores (TinyBERT) or `kl` of their softmax (MiniLM).
        embedding_kind: `cosine` or `mse`.
        similarity_kind: `mse` of the cosines, or `kl` of their softmax at temperature 0.05.
        relation_heads: Number of relation heads; it divides the widths of both models' queries, keys and values, of
            which the last two are narrower where heads share them.
        relation_layer: The teacher's layer whose relations the student's last layer is trained to match, where the
            first is 1; 0 is the last.
        ramps: Maps a term or temperature to its values at the start and at the end of the training, between which it is
            interpolated linearly; they replace its own setting, as in {"hidden": [1, 0], "temperature": [4, 1]}.
        balance: Number of steps after which the weights are rescaled, so that each term's share of the gradient is that
            of its weight; 0 never.
        layer_map: `uniform`; `skip`, every k-th layer of the teacher without the last (PKD); `last`; pairs
            student:teacher such as `0:0,2:6` (0 is the embeddings); `dynamic`: in each step every layer of the student
            is matched to the nearest of the teacher's, in increasing order; or `learned`: each is trained to match a
            mixture of all teacher layers, whose weights are trained.
    """

    kl: float = 1.0
    ce: float = 0.0
    hidden: float = 0.0
    attention: float = 0.0
    relations: float = 0.0
    embedding: float = 0.0
    similarity: float = 0.0
    temperature: float | None = None
    divergence: Literal[
        "forward_kl", "reverse_kl", "jensen_shannon", "skewed_kl", "skewed_reverse_kl", "total_variation",
        "soft_cross_entropy", "decoupled_kl", "logit_mse", "logit_cosine",
    ] = "forward_kl"  # fmt: skip
    beta: float = 0.5
    skew: float = 0.1
    decoupled: tuple[float, float] = (1.0, 8.0)
    hidden_kind: Literal["mse", "cosine", "normalized_mse"] = "mse"
    attention_kind: Literal["mse", "kl"] = "mse"
    embedding_kind: Literal["cosine", "mse"] = "cosine"
    similarity_kind: Literal["mse", "kl"] = "mse"
    relation_heads: int = 12
    relation_layer: int = 0
    layer_map: str = "uniform"
    ramps: dict[str, tuple[float, float]] = field(default_factory=dict, hash=False)
    balance: int = 0

    def __post_init__(self) -> None:
        for name, ends in self.ramps.items():
            if name not in (*TERMS, "temperature") or len(ends) != 2 or min(ends) < 0:
                raise InputError(
                    f"loss.ramps: expected {', '.join(TERMS)} or temperature with two values >= 0, found {name}: {ends}"
                )
            object.__setattr__(self, name, max(ends))  # determines which terms are computed and which signals are read
        if self.temperature is not None:
            object.__setattr__(self, "temperature", float(self.temperature))  # 2 and 2.0 are the same setting
        for place, when in enumerate(("start", "end") if self.ramps else ()):
            if not sum(self.ramps[name][place] if name in self.ramps else getattr(self, name) for name in TERMS) > 0:
                raise InputError(f"loss.ramps: the weights at the {when} sum to nothing: nothing would be learnt there")
        if self.balance < 0:
            raise InputError(f"loss.balance: expected at least 0 steps, found {self.balance}")
        weights = {name: getattr(self, name) for name in TERMS}
        for name, weight in weights.items():
            if weight < 0:
                raise InputError(
                    f"loss.{name}: expected a weight of at least 0, found {weight:g}: the student would be driven away"
                )
        if not sum(weights.values()) > 0:
            raise InputError(f"loss: expected weights with a sum > 0, found {weights}: nothing would be learnt")
        if self.of_vectors and self.of_labels:
            raise InputError(
                f"loss.embedding, loss.similarity: expected kl and ce 0 beside them, found {self.kl} and {self.ce}: "
                "what a model says of a text is a vector or a distribution over classes, and not both"
            )
        if not min(self.ramps.get("temperature", (self.softness,))) > 0:
            found = self.ramps.get("temperature", self.softness)
            raise InputError(f"loss.temperature: expected more than 0, found {found}: logits are divided by it")
        for name, known in KINDS.items():
            if getattr(self, name) not in known:
                raise InputError(f"loss.{name}: expected {', '.join(known)}, found {getattr(self, name)!r}")
        for name in ("beta", "skew"):
            if not 0 < getattr(self, name) < 1:
                raise InputError(
                    f"loss.{name}: expected a share between 0 and 1, found {getattr(self, name)}: one of the two "
                    "distributions would not count"
                )
        if len(self.decoupled) != 2 or min(self.decoupled) < 0 or not sum(self.decoupled) > 0:
            raise InputError(f"loss.decoupled: expected two weights >= 0 with a sum > 0, found {self.decoupled}")
        if self.relation_heads < 1 or self.relation_layer < 0:
            raise InputError(
                "loss.relation_heads, loss.relation_layer: expected at least 1 and at least 0, found "
                f"{self.relation_heads} and {self.relation_layer}"
            )
        if self.attention and self.layer_map in (DYNAMIC, LEARNED):
            raise InputError(
                f"loss.layer_map {self.layer_map}: expected loss.attention 0, found "
                f"{self.attention}: layers are matched by their hidden states; use uniform"
            )
        if self.layer_map not in MAPS and not re.fullmatch(r"\d+:\d+(,\d+:\d+)*", self.layer_map):
            raise InputError(
                f"loss.layer_map: expected {', '.join(MAPS)} or pairs like 0:0,2:6, found {self.layer_map!r}"
            )

    @property
    def softness(self) -> float:
        """The temperature, with its default if it was left out."""
        return DEFAULT_TEMPERATURE if self.temperature is None else self.temperature

    @property
    def needs_teacher(self) -> bool:
        """Whether any term reads the teacher's signals."""
        return bool(self.teacher_answers)

    @property
    def teacher_answers(self) -> tuple[str, ...]:
        """Names of the teacher's signals that the terms read."""
        deep = self.attention > 0 or self.relations > 0
        vectors = ("embedding",) * self.of_vectors
        return ("logits",) * (self.kl > 0) + ("hidden",) * (self.hidden > 0) + ("relations",) * deep + vectors

    @property
    def reads_logits(self) -> bool:
        """Whether any term reads the student's final output."""
        return self.of_labels or self.of_vectors

    @property
    def of_labels(self) -> bool:
        """Whether any term reads the student's final output as a distribution."""
        return self.kl > 0 or self.ce > 0

    @property
    def of_vectors(self) -> bool:
        """Whether any term reads the student's final output as a text's vector."""
        return self.embedding > 0 or self.similarity > 0

    @property
    def of_outputs(self) -> "LossConfig":
        """These settings without the terms on layers."""
        layered = ("hidden", "attention", "relations")
        kept = {name: ends for name, ends in self.ramps.items() if name not in layered}
        return replace(self, hidden=0.0, attention=0.0, relations=0.0, ramps=kept)

    def at(self, progress: float) -> "LossConfig":
        """Returns the settings at a share of the training, from 0 to 1."""
        if not self.ramps:
            return self
        values = {name: first + (last - first) * progress for name, (first, last) in self.ramps.items()}
        return replace(self, ramps={}, **values)  # type: ignore[arg-type]


KINDS = {
    "divergence": DIVERGENCES,
    "hidden_kind": ("mse", "cosine", "normalized_mse"),
    "attention_kind": ("mse", "kl"),
    "embedding_kind": ("cosine", "mse"),
    "similarity_kind": ("mse", "kl"),
}


@dataclass(frozen=True)
class LayerPairs:
    """Pairs (student, teacher) of layers by term; for `hidden` 0 is the embeddings' output, else the first layer."""

    hidden: tuple[tuple[int, int], ...] = ()
    attention: tuple[tuple[int, int], ...] = ()
    relations: tuple[tuple[int, int], ...] = ()

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """The teacher's layers whose hidden states are read."""
        return tuple(sorted({t for _, t in self.hidden}))

    @property
    def vector_layers(self) -> tuple[int, ...]:
        """The teacher's layers whose queries, keys and values are read."""
        return tuple(sorted({t for _, t in (*self.attention, *self.relations)}))


class LayerSizes(NamedTuple):
    """Sizes of a model.

    These are its number of layers, the width of its hidden states, the heads of a layer, the width of a text's vector
    (0: that of the hidden states), and the widths of a layer's queries, keys and values (empty: that of the hidden
    states).
    """

    layers: int
    width: int
    heads: int = 0
    vector: int = 0
    attended: tuple[int, ...] = ()


def match_layers(loss: LossConfig, student: LayerSizes, teacher: LayerSizes) -> LayerPairs:
    """Returns the pairs of layers that the terms compare.

    Raises:
        InputError: A layer doesn't exist, or heads can't be compared.
    """
    if loss.attention and student.heads != teacher.heads:
        raise InputError(
            f"loss.attention: expected as many heads as the teacher's {teacher.heads}, found {student.heads}: scores "
            "of one head would be compared with those of another; loss.relations cuts both into heads anew"
        )
    widths = sorted({width for each in (student, teacher) for width in each.attended or (each.width,)})
    if loss.relations and any(width % loss.relation_heads for width in widths):
        raise InputError(
            f"loss.relation_heads {loss.relation_heads}: expected a number that divides the widths "
            f"{' and '.join(map(str, widths))} of queries, keys and values: the heads of teacher and student would "
            "hold other parts of the vectors"
        )
    if loss.relation_layer > teacher.layers:
        raise InputError(
            f"loss.relation_layer {loss.relation_layer}: out of range: the teacher has layers 1 to {teacher.layers}"
        )
    mapped = loss.hidden or loss.attention
    pairs = tuple(layer_pairs(loss.layer_map, student.layers, teacher.layers)) if mapped else ()
    if loss.attention and not any(s and t for s, t in pairs):
        raise InputError(
            f"loss.layer_map {loss.layer_map}: expected a pair of layers for loss.attention, found the embeddings alone"
        )
    last = (student.layers - 1, (loss.relation_layer or teacher.layers) - 1)
    return LayerPairs(
        pairs if loss.hidden else (),
        tuple((s - 1, t - 1) for s, t in pairs if s and t) if loss.attention else (),
        (last,) if loss.relations else (),
    )


def check_part(loss: LossConfig, form: str) -> None:
    """Checks a loss against signals of `form` (sampled, topk), which contain only a part of the teacher's distribution.

    Raises:
        InputError: The loss needs the whole distribution, or several temperatures.
    """
    moved = loss.ramps.get("temperature", (loss.softness,))
    if loss.kl and len({*moved}) > 1:
        raise InputError(
            f"loss.ramps: expected one temperature with cached {form} signals, which are written at it, found "
            f"{moved[0]:g} to {moved[-1]:g}: only the student would be softened; keep.signals logits has them all"
        )
    if loss.kl and loss.divergence not in OF_PART:
        raise InputError(
            f"loss.divergence: expected {' or '.join(OF_PART)} with cached {form} signals, found {loss.divergence}: "
            "they tell too little of the teacher's distribution; use keep.signals logits, or teacher.signals online"
        )


def layer_pairs(layer_map: str, student_layers: int, teacher_layers: int) -> list[tuple[int, int]]:
    """Returns pairs (student, teacher) of hidden-state numbers; 0 is the embeddings, the highest the last layer.

    For `skip` they are those of Sun et al. 2019, patient KD (arXiv 1908.09355, section 3.2): student layer i with the
    teacher's i·k, where k is the number of teacher layers per student layer, and without the last, which the logits
    train. For `learned` they are the embeddings, and every layer with all of the teacher's. For `dynamic` they are all
    possible matches: 0 with 0, and layer i with every layer that leaves i - 1 of the teacher's below it and enough
    above it for the following layers. These include every layer of the teacher.

    Raises:
        InputError: A pair names a layer that doesn't exist, or the teacher has too few layers for an increasing order.
    """
    if layer_map == "last":
        return [(student_layers, teacher_layers)]
    if layer_map == "uniform":
        return [(i, round(i * teacher_layers / student_layers)) for i in range(student_layers + 1)]
    if layer_map == "skip":
        if student_layers < 2:
            raise InputError(
                "loss.layer_map skip: expected at least 2 student layers, for the last learns nothing there"
            )
        return [(i, i * max(1, teacher_layers // student_layers)) for i in range(1, student_layers)]
    if layer_map == LEARNED:
        return [(0, 0), *((i, t) for i in range(1, student_layers + 1) for t in range(1, teacher_layers + 1))]
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
