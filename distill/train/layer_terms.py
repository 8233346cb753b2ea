"""Selection and projection of the student and teacher layers that the layer terms compare."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from distill.errors import InputError
from distill.losses.config import DYNAMIC, LEARNED, LayerSizes, LossConfig, layer_pairs, match_layers
from distill.losses.features import DISTANCES, attention_scores
from distill.losses.matching import layer_distances, rising_map
from distill.models.attention import Vectors

Pairs = list[tuple[Tensor, Tensor]]
SIGNALS = {"hidden": "hidden states", "relations": "queries, keys and values"}


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
        self.lessons = match_layers(loss, student, teacher)
        self.uniform = layer_pairs("uniform", student.layers, teacher.layers)
        self.matched: list[tuple[int, float]] = []  # (student layer, teacher layer) of the last step, if they change
        self.turn = 0  # the only student layer being trained, counted from 1; 0 trains all layers
        taught = [s for s, _ in self.lessons.hidden]
        # One projection per student layer where the matched teacher layer can change, otherwise one per pair.
        count = len(set(taught)) if loss.layer_map in (DYNAMIC, LEARNED) else len(taught)
        narrow = student.width != teacher.width
        self.projections = nn.ModuleList(
            nn.Linear(student.width, teacher.width, bias=False) if narrow else nn.Identity() for _ in range(count)
        )
        widths = student.vector or student.width, teacher.vector or teacher.width
        other = loss.embedding > 0 and widths[0] != widths[1]
        self.vectors = nn.Linear(*widths, bias=False) if other else nn.Identity()
        self.mixes = nn.ParameterList()
        if loss.hidden and loss.layer_map == LEARNED:
            steps = torch.arange(1, teacher.layers + 1) / teacher.layers
            self.mixes.extend(
                nn.Parameter(-teacher.layers * (steps - (s + 1) / student.layers).abs()) for s in range(student.layers)
            )

    def check(self, signals: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Returns the teacher layers that the terms need, by name of the signal.

        Raises:
            InputError: The signals lack one of these layers.
        """
        read = {"hidden": self.lessons.hidden_layers, "relations": self.lessons.vector_layers}
        for name, layers in read.items():
            held = signals.get(name, {})
            for layer in layers:
                if layer not in (held if isinstance(held, Mapping) else range(len(held))):
                    raise InputError(
                        f"loss: the teacher's signals hold no {SIGNALS[name]} of layer {layer}; use "
                        f'OnlineTeacher(model, ("logits", "{name}")), or a cache with that layer'
                    )
        return read

    def pairs(
        self,
        mask: Tensor,
        hidden: Sequence[Tensor],
        vectors: Sequence[Vectors],
        signals: Mapping[str, Any],
        mean: Callable[[Tensor], Tensor],
    ) -> dict[str, Pairs]:
        """Returns the pairs (student's, teacher's) of each layer term, see `loss_terms`.

        `mean` averages layer distances over all processes.
        """
        taught, found = signals.get("relations", {}), {}
        if self.lessons.hidden:
            found["hidden"] = self.hidden_pairs(mask, hidden, signals["hidden"], mean)
        if self.lessons.attention:
            found["attention"] = [
                (
                    attention_scores(vectors[s][0], vectors[s][1], self.heads),
                    attention_scores(taught[t][0], taught[t][1], self.heads),
                )
                for s, t in self.lessons.attention
                if self.has_turn(s + 1)
            ]
        if self.lessons.relations:
            (s, t), *_ = self.lessons.relations
            if self.turn:
                s, t = self.turn - 1, self.uniform[self.turn][1] - 1
            found["relations"] = list(zip(vectors[s], taught[t], strict=True))
        return found

    def vector_pairs(self, own: Tensor, signals: Mapping[str, Any]) -> dict[str, Pairs]:
        """Returns the pairs (student's, teacher's) of text vectors of each term, see `loss_terms`.

        The vectors of an online teacher are its logits.

        Raises:
            InputError: The signals contain no text vectors, or the width of the teacher's vectors differs from that of
                the student's projected vectors.
        """
        taught = signals.get("logits", signals.get("embedding"))
        if taught is None:
            raise InputError(
                "loss: the teacher's signals hold no vectors of texts; use a teacher that gives them, or a cache with "
                f"embedding; found {', '.join(sorted(signals)) or 'nothing'}"
            )
        found: dict[str, Pairs] = {"similarity": [(own, taught)]} if self.loss.similarity else {}
        if self.loss.embedding:
            projected = self.vectors(own)
            if projected.shape[-1] != taught.shape[-1]:
                raise InputError(
                    f"loss.embedding: expected vectors of width {projected.shape[-1]}, found the teacher's of "
                    f"{taught.shape[-1]}: give teacher_sizes, for which the student's are projected, or use similarity"
                )
            found["embedding"] = [(projected, taught)]
        return found

    def has_turn(self, layer: int) -> bool:
        return not self.turn or layer == self.turn or (self.turn == 1 and layer == 0)

    def hidden_pairs(
        self,
        mask: Tensor,
        own: Sequence[Tensor],
        taught: Mapping[int, Tensor] | Sequence[Tensor],
        mean: Callable[[Tensor], Tensor],
    ) -> Pairs:
        """Returns the pairs (student's, teacher's) of hidden states to compare, the student's projected."""
        if self.loss.layer_map == LEARNED:
            return self.mixed(own, taught)
        if self.loss.layer_map != DYNAMIC:
            mapped = zip(self.projections, self.lessons.hidden, strict=True)
            return [(project(own[s]), taught[t]) for project, (s, t) in mapped if self.has_turn(s)]
        projected = [project(each) for project, each in zip(self.projections, own, strict=True)]
        pairs = self.nearest(mask, projected, [taught[t] for t in self.lessons.hidden_layers], mean)
        self.matched = [(s, float(t)) for s, t in pairs]
        return [(projected[s], taught[t]) for s, t in pairs]

    def nearest(
        self, mask: Tensor, projected: Sequence[Tensor], taught: Sequence[Tensor], mean: Callable[[Tensor], Tensor]
    ) -> list[tuple[int, int]]:
        """Returns the layer pairs with the smallest distances over the whole batch, so that they are the same on every
        process.
        """
        distances = mean(layer_distances(projected[1:], taught[1:], mask, DISTANCES[self.loss.hidden_kind]))
        return [(0, 0), *((s + 1, t + 1) for s, t in enumerate(rising_map(distances)))]

    def mixed(self, own: Sequence[Tensor], taught: Mapping[int, Tensor] | Sequence[Tensor]) -> Pairs:
        """Returns each student layer paired with its own mixture of all teacher layers.

        Source: Passban et al. 2021, ALP-KD (arXiv 2012.14022), equation 4: each layer is trained to match a weighted
        mean of all teacher layers instead of a single one. The weights here are parameters, trained with the student
        and initialised around the uniform map, instead of products of hidden states.
        """
        layers = torch.stack([taught[t] for t in self.lessons.hidden_layers[1:]])
        shares = [mix.float().softmax(0) for mix in self.mixes]
        numbers = torch.arange(1, len(layers) + 1, device=layers.device)
        self.matched = [(s + 1, float((share.detach() * numbers).sum())) for s, share in enumerate(shares)]
        targets = [taught[0], *(torch.tensordot(share.to(layers), layers, 1) for share in shares)]
        return [(project(each), target) for project, each, target in zip(self.projections, own, targets, strict=True)]
