"""Which of the teacher's layers each layer of the student learns from, where that is decided anew in each step."""

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from jaxtyping import Float, Int
from torch import Tensor

Hidden = Float[Tensor, "batch length width"]
Distance = Callable[[Tensor, Tensor, Tensor], Tensor]


@torch.no_grad()
def layer_distances(
    student: Sequence[Hidden], teacher: Sequence[Hidden], mask: Int[Tensor, "batch length"], distance: Distance
) -> Float[Tensor, "layers offsets"]:
    """Row i, column k: distance of the student's layer i from the teacher's layer i + k, both counted from 0.

    In a strictly rising map layer i has at least i of the teacher's layers below its own and enough above it for the
    layers that follow, so these pairs are all there are; their number is layers x (teacher layers - layers + 1).

    Args:
        student: Hidden states of its layers, projected to the teacher's width, the lowest first.
        teacher: Those of the teacher, at least as many.
        mask: 1 where there is a token.
        distance: Of `DISTANCES`, between (student, teacher) under the mask.
    """
    spare = len(teacher) - len(student)
    rows = [[distance(own, teacher[i + k], mask) for k in range(spare + 1)] for i, own in enumerate(student)]
    return torch.stack([torch.stack(row) for row in rows])


def rising_map(distances: Float[Tensor, "layers offsets"]) -> list[int]:
    """The teacher's layer for each of the student's, counted from 0: the strictly rising map of the least sum.

    distances[i, k] belongs to the pair (i, i + k), so a map rises strictly where its offsets k never fall. The least
    sum down to row i with an offset of at most k takes one pass over the rows; among equal sums the lower layers win.

    Source: Xia et al. 2022, CoFi (arXiv 2204.00408), section 3.2: layers are matched by the distance of their hidden
    states in each step, in an order that is kept. CoFi looks for the student's layer nearest to each of four teacher
    layers, from the last one down, because its student may lose layers while it trains. Here the student's layers are
    fixed, so each of them gets a teacher layer, and the sum over all of them is minimised exactly instead of one choice
    after another. Strictly rising: where two layers may learn the same one, all of them are drawn to the layer that
    is easiest to imitate, and a layer with residual connections learns to do nothing.
    """
    costs = distances.double().tolist()
    totals, reached = costs[0], []
    for row in costs[1:]:
        best = list(accumulate(zip(totals, range(len(row)), strict=True), min))
        reached.append([offset for _, offset in best])
        totals = [total + cost for (total, _), cost in zip(best, row, strict=True)]
    offsets = [min(range(len(totals)), key=totals.__getitem__)]
    for before in reversed(reached):
        offsets.append(before[offsets[-1]])
    return [layer + offset for layer, offset in enumerate(reversed(offsets))]
