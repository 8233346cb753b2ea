"""Matching of the student's layers to the teacher's, recomputed in each step."""

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from jaxtyping import Float, Int
from torch import Tensor

HiddenStates = Float[Tensor, "batch length width"]
HiddenDistance = Callable[[Tensor, Tensor, Tensor], Tensor]


@torch.no_grad()
def compute_layer_distances(
    student: Sequence[HiddenStates],
    teacher: Sequence[HiddenStates],
    mask: Int[Tensor, "batch length"],
    distance: HiddenDistance,
) -> Float[Tensor, "layers offsets"]:
    """Returns the distances [i, k] between the student's layer i and the teacher's layer i + k, both counted from 0.

    In a strictly increasing map, layer i has at least i of the teacher's layers below its own, and enough above it for
    the following layers, so these are all possible pairs; their number is layers x (teacher layers - layers + 1).

    Args:
        student: Hidden states of the student's layers, projected to the teacher's width, the lowest first.
        teacher: Hidden states of the teacher's layers, at least as many.
        mask: 1 at tokens, 0 at padding.
        distance: One of `features.HIDDEN_DISTANCES`, called with (student, teacher, mask).
    """
    surplus = len(teacher) - len(student)
    rows = [[distance(state, teacher[i + k], mask) for k in range(surplus + 1)] for i, state in enumerate(student)]
    return torch.stack([torch.stack(row) for row in rows])


def find_increasing_map(distances: Float[Tensor, "layers offsets"]) -> list[int]:
    """Returns each student layer's teacher layer, from 0: the strictly increasing map of minimal total distance.

    distances[i, k] belongs to the pair (i, i + k), so a map is strictly increasing if its offsets k never decrease. The
    minimal sum up to row i with an offset of at most k takes one pass over the rows; ties are resolved in favour of
    lower layers.

    Source: Xia et al. 2022, CoFi (arXiv 2204.00408), section 3.2: layers are matched by the distance of their hidden
    states in each step, preserving their order. CoFi looks for the student's layer nearest to each of four teacher
    layers, starting from the last, because its student may lose layers during training. Here the student's layers are
    fixed, so each of them gets a teacher layer, and the sum over all of them is minimized exactly instead of greedily.
    The map is strictly increasing because layers that may share a target are all drawn to the teacher layer that is
    easiest to imitate, and a layer with residual connections then learns the identity.
    """
    costs = distances.double().tolist()
    totals, predecessors = costs[0], []
    for row in costs[1:]:
        best = list(accumulate(zip(totals, range(len(row)), strict=True), min))
        predecessors.append([offset for _, offset in best])
        totals = [total + cost for (total, _), cost in zip(best, row, strict=True)]
    offsets = [min(range(len(totals)), key=totals.__getitem__)]
    for offsets_before in reversed(predecessors):
        offsets.append(offsets_before[offsets[-1]])
    return [layer + offset for layer, offset in enumerate(reversed(offsets))]
