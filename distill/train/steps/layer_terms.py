"""Selection and projection of the student and teacher layers that the layer terms compare."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from distill.errors import InputError
from distill.losses.compose import TensorPair
from distill.losses.config import DYNAMIC, LAYER_TERMS, LEARNED, LayerSizes, LossConfig, match_layers, pair_layers
from distill.losses.features import HIDDEN_DISTANCES, attention_scores
from distill.losses.matching import compute_layer_distances, find_increasing_map
from distill.losses.teacher_signals import AttentionVectors, TeacherSignals
from distill.models.layer_sizes import read_layer_sizes

TensorPairs = list[TensorPair]
_States = Mapping[int, Tensor] | Sequence[Tensor]  # hidden states by layer
_CONTENTS = {"hidden": "hidden states", "relations": "queries, keys and values"}  # of a signal


class LayerTerms(nn.Module):
    """The layer pairs, the projections to the teacher's width, and the weights of a learned layer map.

    Args:
        loss: Enabled terms and the layer map.
        student, teacher: Sizes of the two models.

    Raises:
        InputError: The layer map names layers that don't exist, or the attention heads can't be compared.
    """

    def __init__(self, loss: LossConfig, student: LayerSizes, teacher: LayerSizes):
        super().__init__()
        self.loss, self.heads = loss, student.heads
        self.layer_pairs = match_layers(loss, student, teacher)
        self.uniform_pairs = pair_layers("uniform", student.layers, teacher.layers)
        self.layer_matches: list[
            tuple[int, float]
        ] = []  # (student layer, teacher layer) of the last step, if they change
        self.active_layer = 0  # the only student layer being trained, counted from 1; 0 trains all layers
        trained = [s for s, _ in self.layer_pairs.hidden]
        # One projection per student layer where the matched teacher layer can change, otherwise one per pair.
        count = len(set(trained)) if loss.layer_map in (DYNAMIC, LEARNED) else len(trained)
        needs_projection = student.width != teacher.width
        self.projections = nn.ModuleList(
            nn.Linear(student.width, teacher.width, bias=False) if needs_projection else nn.Identity()
            for _ in range(count)
        )
        widths = student.vector_width or student.width, teacher.vector_width or teacher.width
        needs_projection = loss.computes("embedding") and widths[0] != widths[1]
        self.vector_projection = nn.Linear(*widths, bias=False) if needs_projection else nn.Identity()
        self.mixture_logits = nn.ParameterList()
        if loss.computes("hidden") and loss.layer_map == LEARNED:
            depths = torch.arange(1, teacher.layers + 1) / teacher.layers
            self.mixture_logits.extend(
                nn.Parameter(-teacher.layers * (depths - (s + 1) / student.layers).abs()) for s in range(student.layers)
            )

    @property
    def deepest_inner_layer(self) -> int | None:
        """The last student layer, counted from 0, whose attention vectors are compared; None if none are."""
        return max((s for s, _ in (*self.layer_pairs.attention, *self.layer_pairs.relations)), default=None)

    def find_needed_layers(self, signals: TeacherSignals) -> dict[str, tuple[int, ...]]:
        """Returns the teacher layers that the terms need, by name of the signal.

        Raises:
            InputError: The signals lack one of these layers.
        """
        hidden, relations = self.layer_pairs.hidden_layers, self.layer_pairs.attention_layers
        _check_layers("hidden", hidden, signals.get("hidden", {}))
        _check_layers("relations", relations, signals.get("relations", {}))
        return {"hidden": hidden, "relations": relations}

    def build_pairs(
        self,
        mask: Tensor,
        hidden: Sequence[Tensor],
        vectors: Sequence[AttentionVectors],
        signals: TeacherSignals,
        mean: Callable[[Tensor], Tensor],
    ) -> dict[str, TensorPairs]:
        """Returns the pairs (student's, teacher's) of each layer term, see `compute_loss_terms`.

        Args:
            mask: Attention mask of the batch [batch, length].
            hidden: The student's hidden states [batch, length, width] by layer, where 0 is the embeddings' output.
            vectors: The student's attention vectors by layer, where 0 is the first layer.
            signals: The teacher's signals.
            mean: Averages layer distances over all processes.
        """
        pairs: dict[str, TensorPairs] = {}
        if self.layer_pairs.hidden:
            pairs["hidden"] = self._pair_hidden(mask, hidden, signals["hidden"], mean)
        if self.layer_pairs.attention:
            teacher = signals["relations"]
            pairs["attention"] = [
                (
                    attention_scores(vectors[s][0], vectors[s][1], self.heads),
                    attention_scores(teacher[t][0], teacher[t][1], self.heads),
                )
                for s, t in self.layer_pairs.attention
                if self._is_active(s + 1)
            ]
        if self.layer_pairs.relations:
            (s, t), *_ = self.layer_pairs.relations
            if self.active_layer:
                s, t = self.active_layer - 1, self.uniform_pairs[self.active_layer][1] - 1
            pairs["relations"] = list(zip(vectors[s], signals["relations"][t], strict=True))
        return pairs

    def build_vector_pairs(self, vectors: Tensor, signals: TeacherSignals) -> dict[str, TensorPairs]:
        """Returns the pairs (student's, teacher's) of text vectors of each term, see `compute_loss_terms`.

        Args:
            vectors: The student's vectors [batch, width].
            signals: The teacher's signals; the vectors of an online teacher are its logits.

        Raises:
            InputError: The signals contain no text vectors, or the width of the teacher's vectors differs from that of
                the student's projected vectors.
        """
        teacher = signals["logits"] if "logits" in signals else signals.get("embedding")
        if teacher is None:
            raise InputError(
                f"loss: expected vectors of texts in the teacher's signals, found "
                f"{', '.join(sorted(signals)) or 'nothing'}: there is nothing to compare with; use a sentence encoder "
                "as the teacher, or a cache with embedding"
            )
        pairs: dict[str, TensorPairs] = {"similarity": [(vectors, teacher)]} if self.loss.computes("similarity") else {}
        if self.loss.computes("embedding"):
            projected = self.vector_projection(vectors)
            if projected.shape[-1] != teacher.shape[-1]:
                raise InputError(
                    f"loss.embedding: expected vectors of width {projected.shape[-1]}, found the teacher's of "
                    f"{teacher.shape[-1]}: they can't be compared; pass teacher_sizes, so that the student's are "
                    "projected, or use similarity"
                )
            pairs["embedding"] = [(projected, teacher)]
        return pairs

    def _is_active(self, layer: int) -> bool:
        active = self.active_layer
        return not active or layer == active or (active == 1 and layer == 0)

    def _pair_hidden(
        self, mask: Tensor, student: Sequence[Tensor], teacher: _States, mean: Callable[[Tensor], Tensor]
    ) -> TensorPairs:
        """Returns the pairs of hidden states to compare, with the student's projected."""
        if self.loss.layer_map == LEARNED:
            return self._pair_with_mixtures(student, teacher)
        if self.loss.layer_map != DYNAMIC:
            mapped = zip(self.projections, self.layer_pairs.hidden, strict=True)
            return [(project(student[s]), teacher[t]) for project, (s, t) in mapped if self._is_active(s)]
        projected = [project(state) for project, state in zip(self.projections, student, strict=True)]
        layers = self._match_nearest(mask, projected, [teacher[t] for t in self.layer_pairs.hidden_layers], mean)
        self.layer_matches = [(s, float(t)) for s, t in layers]
        return [(projected[s], teacher[t]) for s, t in layers]

    def _match_nearest(
        self, mask: Tensor, projected: Sequence[Tensor], teacher: Sequence[Tensor], mean: Callable[[Tensor], Tensor]
    ) -> list[tuple[int, int]]:
        """Returns the layer pairs with the smallest distances over the whole batch, the same on every process."""
        distance = HIDDEN_DISTANCES[self.loss.hidden_kind]
        distances = mean(compute_layer_distances(projected[1:], teacher[1:], mask, distance))
        return [(0, 0), *((s + 1, t + 1) for s, t in enumerate(find_increasing_map(distances)))]

    def _pair_with_mixtures(self, student: Sequence[Tensor], teacher: _States) -> TensorPairs:
        """Returns each student layer paired with its own mixture of all teacher layers.

        Source: Passban et al. 2021, ALP-KD (arXiv 2012.14022), equation 4: each layer is trained to match a weighted
        mean of all teacher layers instead of a single one. The weights here are parameters, trained with the student
        and initialized around the uniform map, instead of products of hidden states.
        """
        layers = torch.stack([teacher[t] for t in self.layer_pairs.hidden_layers[1:]])
        weights = [logits.float().softmax(0) for logits in self.mixture_logits]
        numbers = torch.arange(1, len(layers) + 1, device=layers.device)
        self.layer_matches = [(s + 1, float((each.detach() * numbers).sum())) for s, each in enumerate(weights)]
        targets = [teacher[0], *(torch.tensordot(each.to(layers), layers, 1) for each in weights)]
        states = zip(self.projections, student, targets, strict=True)
        return [(project(state), target) for project, state, target in states]


def build_layer_terms(
    loss: LossConfig, student: PreTrainedModel, teacher_sizes: LayerSizes | None, *, is_pipeline: bool = False
) -> LayerTerms:
    """Returns the layer terms of a student, whose own sizes stand for the teacher's where no term reads these.

    Raises:
        InputError: A term needs the sizes of the teacher and there are none, or all layers of a student in pipeline
            stages; and as in `LayerTerms`.
    """
    enabled = [name for name in LAYER_TERMS if loss.computes(name)]
    if (enabled or loss.uses_vectors) and is_pipeline:
        name = enabled[0] if enabled else "embedding"
        raise InputError(
            f"loss.{name}: expected weight 0 with a student in pipeline stages, found {loss.peak_weight(name):g}: no "
            "process has all its layers; use kl"
        )
    if enabled and teacher_sizes is None:
        raise InputError(
            f"loss.{enabled[0]}: expected the sizes of the teacher, found none: layers can't be matched; pass "
            "teacher_sizes"
        )
    sizes = read_layer_sizes(student.config)
    return LayerTerms(loss, sizes, LayerSizes(*teacher_sizes) if teacher_sizes else sizes)


def _check_layers(name: str, layers: Sequence[int], values: Mapping[int, object] | Sequence[object]) -> None:
    available = values if isinstance(values, Mapping) else range(len(values))
    for layer in layers:
        if layer not in available:
            raise InputError(
                f"loss: expected {_CONTENTS[name]} of layer {layer} in the teacher's signals, found none; use "
                f'OnlineTeacher(model, ("logits", "{name}")), or a cache with that layer'
            )
