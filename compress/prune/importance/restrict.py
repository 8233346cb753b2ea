"""Importance scores of what a shape keeps of a model."""

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from compress.prune.importance.scores import Scores, compute_fingerprint
from distill.slicing import Axis, Shape


def restrict_scores(scores: Scores, shape: Shape, small: nn.Module, axes: Sequence[Axis]) -> Scores:
    """Returns the scores of the units and layers that are kept, under the names that they have in the pruned model.

    Args:
        scores: Scores of the model before pruning.
        shape: What is kept of it.
        small: The pruned model.
        axes: Its axes; those that it has lost because a single unit is left have no scores.
    """
    values = {}
    for axis in axes:
        old = axis.name if axis.layer is None else f"layers.{shape.layers[axis.layer]}.{axis.kind}"
        if old in scores.values:
            values[axis.name] = scores.values[old][shape.kept[old]] if old in shape.kept else scores.values[old]
    layers = scores.layers[list(shape.layers)]
    return replace(scores, values=values, layers=layers, fingerprint=compute_fingerprint(small))
