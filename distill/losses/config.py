"""Settings of the objectives and their weights, and the pairs of layers that they compare."""

import re
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from distill.errors import InputError

TERMS = ("kl", "ce", "hidden", "attention", "relations", "embedding", "similarity")
LAYER_TERMS = ("hidden", "attention", "relations")  # terms that compare layers
PROJECTED_TERMS = ("hidden", "embedding")  # terms with parameters of their own
DIVERGENCES = (
    "forward_kl", "reverse_kl", "jensen_shannon", "skewed_kl", "skewed_reverse_kl", "total_variation",
    "soft_cross_entropy", "decoupled_kl", "logit_mse", "logit_cosine",
)  # fmt: skip
SPARSE_DIVERGENCES = ("forward_kl", "soft_cross_entropy")  # computable from a sample or the most probable classes
DEFAULT_TEMPERATURE = 2.0
DYNAMIC = "dynamic"
LEARNED = "learned"
LAYER_MAPS = ("uniform", "skip", "last", DYNAMIC, LEARNED)


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
        embedding: Weight of the distance from the teacher's embedding of a text; a narrower student's is projected to
            the teacher's width by a map that isn't kept.
        similarity: Weight of the distance between the pairwise cosines of a batch's texts in student and teacher (of
            each process's share of the batch).
        temperature: Softmax temperature of both distributions of `kl`; the term is multiplied by its square. If omitted
            it is 2, or 1 in a run on a language model, where 2 leaves little to learn.
        divergence: Divergence of `kl`: forward_kl, reverse_kl, jensen_shannon, skewed_kl, skewed_reverse_kl,
            total_variation, soft_cross_entropy, decoupled_kl (DKD, needs labels), logit_mse or logit_cosine.
        beta: The teacher's share of jensen_shannon's mixture.
        skew: Share of the first distribution that skewed_kl and skewed_reverse_kl mix into the second.
        decoupled: Weights of decoupled_kl's two parts, the label against the rest and within the rest, as JSON: [1, 8].
        hidden_kind: Distance of `hidden`: `mse`, `cosine`, or `normalized_mse` (mse of unit vectors, patient KD).
        attention_kind: Distance of `attention`: `mse` of scores (TinyBERT) or `kl` of their softmax (MiniLM).
        embedding_kind: Distance of `embedding`: `cosine` or `mse`.
        similarity_kind: Distance of `similarity`: `mse` of the cosines, or `kl` of their softmax at temperature 0.05.
        relation_heads: Number of relation heads; must divide the widths of both models' queries, keys and values (the
            latter two are narrower with grouped-query attention).
        relation_layer: The teacher's layer whose relations the student's last layer is trained to match, where the
            first is 1; 0 is the last.
        ramps: Linear schedules of term weights or the temperature, in place of their own settings: name to values at
            the start and end of training, as in {"hidden": [1, 0], "temperature": [4, 1]}.
        balance_every: Rescale the weights every so many steps, so that each term's share of the gradient is that of its
            weight; 0: never.
        layer_map: Which layers `hidden` and `attention` compare: `uniform` (evenly spaced); `skip`, every k-th of the
            teacher's without the last (PKD); `last`; pairs student:teacher such as `0:0,2:6` (0 is the embeddings); for
            `hidden` only, `dynamic` (the nearest, in increasing order, matched again in each step) or `learned` (a
            trained mixture of all teacher layers).
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
    balance_every: int = 0

    def __post_init__(self) -> None:
        self._check_ramps()
        self._check_weights()
        self._check_temperature()
        self._check_divergence()
        self._check_layer_settings()

    def _check_ramps(self) -> None:
        for name, ends in self.ramps.items():
            if name not in (*TERMS, "temperature") or len(ends) != 2 or min(ends) < 0:
                raise InputError(
                    f"loss.ramps: expected {', '.join(TERMS)} or temperature with two values >= 0, found {name}: {ends}"
                )

    def _check_weights(self) -> None:
        for i, when in enumerate(("start", "end") if self.ramps else ()):
            total = sum(self.ramps[name][i] if name in self.ramps else getattr(self, name) for name in TERMS)
            if not total > 0:
                raise InputError(
                    f"loss.ramps: expected weights with a sum > 0 at the {when}, found {total:g}: nothing would be "
                    "learnt there"
                )
        if self.balance_every < 0:
            raise InputError(f"loss.balance_every: expected at least 0 steps, found {self.balance_every}")
        weights = {name: self.peak_weight(name) for name in TERMS}
        for name, weight in weights.items():
            if weight < 0:
                raise InputError(
                    f"loss.{name}: expected a weight of at least 0, found {weight:g}: the student would be pushed away "
                    "from its target"
                )
        if not sum(weights.values()) > 0:
            raise InputError(f"loss: expected weights with a sum > 0, found {weights}: nothing would be learnt")
        if self.uses_vectors and self.uses_logits:
            raise InputError(
                f"loss.embedding, loss.similarity: expected kl and ce 0 beside them, found {weights['kl']} and "
                f"{weights['ce']}: the output of a model for a text is either a vector or a distribution over classes"
            )

    def _check_temperature(self) -> None:
        temperatures = self.ramps.get("temperature", (self.resolved_temperature,))
        if not min(temperatures) > 0:
            found = self.ramps.get("temperature", self.resolved_temperature)
            raise InputError(f"loss.temperature: expected more than 0, found {found}: logits are divided by it")

    def _check_divergence(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise InputError(f"loss.{name}: expected {', '.join(choices)}, found {getattr(self, name)!r}")
        for name in ("beta", "skew"):
            if not 0 < getattr(self, name) < 1:
                raise InputError(
                    f"loss.{name}: expected a share between 0 and 1, found {getattr(self, name)}: one of the two "
                    "distributions would have no effect"
                )
        if len(self.decoupled) != 2 or min(self.decoupled) < 0 or not sum(self.decoupled) > 0:
            raise InputError(f"loss.decoupled: expected two weights >= 0 with a sum > 0, found {self.decoupled}")

    def _check_layer_settings(self) -> None:
        if self.relation_heads < 1 or self.relation_layer < 0:
            raise InputError(
                "loss.relation_heads, loss.relation_layer: expected at least 1 and at least 0, found "
                f"{self.relation_heads} and {self.relation_layer}"
            )
        if self.computes("attention") and self.layer_map in (DYNAMIC, LEARNED):
            raise InputError(
                f"loss.layer_map {self.layer_map}: expected loss.attention 0, found "
                f"{self.peak_weight('attention')}: layers are matched by their hidden states; use uniform"
            )
        if self.layer_map not in LAYER_MAPS and not re.fullmatch(r"\d+:\d+(,\d+:\d+)*", self.layer_map):
            raise InputError(
                f"loss.layer_map: expected {', '.join(LAYER_MAPS)} or pairs like 0:0,2:6, found {self.layer_map!r}"
            )

    @property
    def resolved_temperature(self) -> float:
        """The temperature, the highest of its ramp, or the default if it was omitted."""
        temperature = DEFAULT_TEMPERATURE if self.temperature is None else self.temperature
        return float(max(self.ramps.get("temperature", (temperature,))))

    def peak_weight(self, term: str) -> float:
        """Returns the highest weight of a term during the training: that of its ramp, if it has one."""
        return float(max(self.ramps.get(term, (getattr(self, term),))))

    def computes(self, *terms: str) -> bool:
        """Returns whether any of the terms has a weight above 0 at some time, so that its signals are needed."""
        return any(self.peak_weight(term) > 0 for term in terms)

    @property
    def terms(self) -> str:
        """The terms that are computed and their largest weights, for messages: `kl=1, hidden=0.5`."""
        return ", ".join(f"{name}={self.peak_weight(name):g}" for name in TERMS if self.computes(name))

    @property
    def trains_every_parameter(self) -> bool:
        """Whether every step trains all of the student and the projections: no weight is 0 for a while.

        Terms on layers alone don't reach the head, or the pooler of a body without one.
        """
        least = {name: min(self.ramps.get(name, (getattr(self, name),))) for name in TERMS}
        reaches_outputs = any(least[name] > 0 for name in TERMS if name not in LAYER_TERMS)
        return reaches_outputs and all(least[name] > 0 for name in PROJECTED_TERMS if self.computes(name))

    @property
    def needs_teacher(self) -> bool:
        """Whether any term reads the teacher's signals."""
        return bool(self.teacher_outputs)

    @property
    def teacher_outputs(self) -> tuple[str, ...]:
        """Names of the teacher's outputs that the terms read, as in `OnlineTeacher`."""
        needed = {
            "logits": self.computes("kl"),
            "hidden": self.computes("hidden"),
            "relations": self.computes("attention", "relations"),
            "embedding": self.uses_vectors,
        }
        return tuple(name for name, is_needed in needed.items() if is_needed)

    @property
    def uses_outputs(self) -> bool:
        """Whether any term reads the student's final output."""
        return self.uses_logits or self.uses_vectors

    @property
    def uses_logits(self) -> bool:
        """Whether any term reads the student's final output as a distribution."""
        return self.computes("kl", "ce")

    @property
    def uses_vectors(self) -> bool:
        """Whether any term reads the student's final output as a text's vector."""
        return self.computes("embedding", "similarity")

    @property
    def without_layer_terms(self) -> "LossConfig":
        """These settings without the terms on layers."""
        ramps = {name: ends for name, ends in self.ramps.items() if name not in LAYER_TERMS}
        return replace(self, hidden=0.0, attention=0.0, relations=0.0, ramps=ramps)

    def interpolate_ramps(self, progress: float) -> "LossConfig":
        """Returns the settings without ramps at `progress`, the completed share of the training from 0 to 1."""
        if not self.ramps:
            return self
        values = {name: first + (last - first) * progress for name, (first, last) in self.ramps.items()}
        return replace(self, ramps={}, **values)  # type: ignore[arg-type]


_CHOICES = {
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
        """The teacher's layers whose hidden states are compared, in ascending order."""
        return tuple(sorted({t for _, t in self.hidden}))

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The teacher's layers whose queries, keys and values are compared, in ascending order."""
        return tuple(sorted({t for _, t in (*self.attention, *self.relations)}))


class LayerSizes(NamedTuple):
    """Sizes of a model.

    Attributes:
        layers: Number of layers.
        width: Width of the hidden states.
        heads: Attention heads of a layer.
        vector_width: Width of a text's vector; 0 is that of the hidden states.
        attention_widths: Widths of a layer's queries, keys and values; empty is that of the hidden states.
    """

    layers: int
    width: int
    heads: int = 0
    vector_width: int = 0
    attention_widths: tuple[int, ...] = ()


def match_layers(loss: LossConfig, student: LayerSizes, teacher: LayerSizes) -> LayerPairs:
    """Returns the pairs of layers that the terms compare.

    Raises:
        InputError: A layer doesn't exist, or the attention heads can't be compared.
    """
    if loss.computes("attention") and student.heads != teacher.heads:
        raise InputError(
            f"loss.attention: expected as many heads as the teacher's {teacher.heads}, found {student.heads}: scores "
            "of one head would be compared with those of another; use loss.relations, which has heads of its own"
        )
    widths = sorted({width for each in (student, teacher) for width in each.attention_widths or (each.width,)})
    if loss.computes("relations") and any(width % loss.relation_heads for width in widths):
        raise InputError(
            f"loss.relation_heads: expected a divisor of the widths {' and '.join(map(str, widths))} of queries, keys "
            f"and values, found {loss.relation_heads}: the heads of teacher and student would contain different parts "
            "of the vectors"
        )
    if loss.relation_layer > teacher.layers:
        raise InputError(
            f"loss.relation_layer: expected a layer of the teacher from 1 to {teacher.layers}, found "
            f"{loss.relation_layer}"
        )
    mapped = loss.computes("hidden", "attention")
    pairs = tuple(pair_layers(loss.layer_map, student.layers, teacher.layers)) if mapped else ()
    if loss.computes("attention") and not any(s and t for s, t in pairs):
        raise InputError(
            f"loss.layer_map {loss.layer_map}: expected a pair of layers for loss.attention, found only the embeddings"
        )
    last = (student.layers - 1, (loss.relation_layer or teacher.layers) - 1)
    return LayerPairs(
        pairs if loss.computes("hidden") else (),
        tuple((s - 1, t - 1) for s, t in pairs if s and t) if loss.computes("attention") else (),
        (last,) if loss.computes("relations") else (),
    )


def check_sparse_signals(loss: LossConfig, form: str) -> None:
    """Checks that a loss can be computed from signals of `form` (sampled, topk), a part of the teacher's distribution.

    Raises:
        InputError: The loss needs the whole distribution, or several temperatures.
    """
    temperatures = loss.ramps.get("temperature", (loss.resolved_temperature,))
    if loss.computes("kl") and len({*temperatures}) > 1:
        raise InputError(
            f"loss.ramps: expected a constant temperature with cached {form} signals, which are written at one, found "
            f"{temperatures[0]:g} to {temperatures[-1]:g}: only the student would be softened; use keep.signals logits"
        )
    if loss.computes("kl") and loss.divergence not in SPARSE_DIVERGENCES:
        raise InputError(
            f"loss.divergence: expected {' or '.join(SPARSE_DIVERGENCES)} with cached {form} signals, found "
            f"{loss.divergence}: they contain too little of the teacher's distribution; use keep.signals logits, or "
            "teacher.online true"
        )


def pair_layers(layer_map: str, student_layers: int, teacher_layers: int) -> list[tuple[int, int]]:
    """Returns pairs (student, teacher) of hidden-state numbers; 0 is the embeddings, the highest the last layer.

    For `skip` they are those of Sun et al. 2019, patient KD (arXiv 1908.09355, section 3.2): student layer i with the
    teacher's i·k, where k is the number of teacher layers per student layer, and without the last, which the logits
    train. For `learned` they are the embeddings, and every layer with all of the teacher's. For `dynamic` they are all
    possible matches: 0 with 0, and layer i with every layer that leaves i - 1 of the teacher's below it and enough
    above it for the following layers. These include every layer of the teacher.

    Raises:
        InputError: A pair names a layer that doesn't exist, or the teacher has fewer layers than the student, with
            `skip` or `dynamic`.
    """
    if layer_map == "last":
        return [(student_layers, teacher_layers)]
    if not student_layers:
        return []
    if layer_map == "uniform":
        return [(i, round(i * teacher_layers / student_layers)) for i in range(student_layers + 1)]
    if layer_map == "skip":
        if student_layers < 2:
            raise InputError(
                f"loss.layer_map skip: expected at least 2 student layers, found {student_layers}: it skips the last "
                "layer, and no layer would be left"
            )
        if student_layers > teacher_layers:
            raise InputError(
                f"loss.layer_map skip: expected at most {teacher_layers} student layers, the teacher's number, found "
                f"{student_layers}: it skips layers of the teacher; use uniform"
            )
        return [(i, i * (teacher_layers // student_layers)) for i in range(1, student_layers)]
    if layer_map == LEARNED:
        return [(0, 0), *((i, t) for i in range(1, student_layers + 1) for t in range(1, teacher_layers + 1))]
    if layer_map == DYNAMIC:
        surplus = teacher_layers - student_layers
        if surplus < 0:
            raise InputError(
                f"loss.layer_map dynamic: expected at most {teacher_layers} student layers, the teacher's number, "
                f"found {student_layers}: each is matched to a higher layer than the one before; use uniform"
            )
        return [(0, 0), *((i, i + k) for i in range(1, student_layers + 1) for k in range(surplus + 1))]
    pairs = [(int(s), int(t)) for s, t in (pair.split(":") for pair in layer_map.split(","))]
    for s, t in pairs:
        if s > student_layers or t > teacher_layers:
            raise InputError(
                f"loss.layer_map: expected pairs of student layers 0 to {student_layers} and teacher layers 0 to "
                f"{teacher_layers} (0 is the embeddings), found {s}:{t}"
            )
    return pairs
