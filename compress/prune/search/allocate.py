"""Allocation of a latency budget at the lowest estimated loss: kept layers, with their heads and neurons."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from compress.prune.search.cost import CostModel


@dataclass(frozen=True)
class Options:
    """The sizes to which a layer may be pruned and their losses, one entry per option, the largest size last.

    Args:
        heads, ffn: Units that are kept.
        heads_loss, ffn_loss: Estimated increase of the loss that the scores were measured with.
        layer_loss: Increase of that loss if the layer is removed.
    """

    heads: tuple[int, ...]
    ffn: tuple[int, ...]
    heads_loss: tuple[float, ...]
    ffn_loss: tuple[float, ...]
    layer_loss: float


@dataclass(frozen=True)
class Limit:
    """An upper bound on the cost of a model, in milliseconds or bytes."""

    costs: CostModel
    most: float


@dataclass(frozen=True)
class Choice:
    """The kept layers and the units of each."""

    layers: tuple[int, ...]
    heads: tuple[int, ...]
    ffn: tuple[int, ...]
    loss: float
    milliseconds: float


def allocate(
    layers: Sequence[Options],
    costs: CostModel,
    hidden: int,
    depth: int,
    milliseconds: float,
    *,
    uniform: bool = False,
    among: Sequence[int] | None = None,
    size: Limit | None = None,
) -> Choice | None:
    """Returns the allocation of lowest estimated loss with `depth` layers within `milliseconds`, None if infeasible.

    Args:
        layers: Options of every layer of the full model.
        costs: Cost model of the latency.
        hidden: Width of the residual stream.
        depth: Number of layers to keep.
        milliseconds: Maximum latency of a call.
        uniform: Whether every layer gets the same sizes.
        among: Layers to keep; None leaves the selection to the solver.
        size: A second limit, on bytes.

    Source: ZipLM (Kurtic et al. 2023, arXiv 2302.04089, section 3.2) chooses among blocks of measured latency by
        dynamic programming; here it is a mixed-integer linear programme, solved by HiGHS through SciPy.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    programme = Programme(layers, costs, hidden)
    rows = [programme.depth(depth), *programme.consistent()]
    rows += [programme.within(each) for each in (Limit(costs, milliseconds), size) if each is not None]
    if uniform:
        rows += programme.alike()
    if among is not None:
        rows += programme.fixed(among)
    matrix, low, high = (np.array(part) for part in zip(*rows, strict=True))
    found = milp(
        programme.losses(),
        constraints=LinearConstraint(matrix, low, high),
        integrality=np.ones(programme.size),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 1e-6, "time_limit": 20},
    )
    return programme.read(found.x) if found.x is not None else None


Row = tuple[np.ndarray, float, float]


class Programme:
    """The binary variables of `allocate`: for each layer, one for keeping it and one per option of heads and of ffn."""

    def __init__(self, layers: Sequence[Options], costs: CostModel, hidden: int):
        self.layers, self.costs, self.hidden = layers, costs, hidden
        self.start = np.concatenate([[0], np.cumsum([1 + len(each.heads) + len(each.ffn) for each in layers])])
        self.size = int(self.start[-1])

    def kept(self, layer: int) -> int:
        return int(self.start[layer])

    def heads(self, layer: int) -> range:
        first = int(self.start[layer]) + 1
        return range(first, first + len(self.layers[layer].heads))

    def ffn(self, layer: int) -> range:
        return range(self.heads(layer).stop, int(self.start[layer + 1]))

    def row(self, entries: Mapping[int, float], low: float, high: float) -> Row:
        values = np.zeros(self.size)
        for place, value in entries.items():
            values[place] = value
        return values, low, high

    def losses(self) -> np.ndarray:
        """Returns the objective: a kept layer saves its own loss and adds the losses of its options."""
        values = np.zeros(self.size)
        for number, each in enumerate(self.layers):
            values[self.kept(number)] = -each.layer_loss
            values[list(self.heads(number))] = each.heads_loss
            values[list(self.ffn(number))] = each.ffn_loss
        return values

    def depth(self, count: int) -> Row:
        return self.row({self.kept(number): 1 for number in range(len(self.layers))}, count, count)

    def within(self, limit: Limit) -> Row:
        """Returns the constraint of a limit, in which an option costs what it adds to a layer without units."""
        costs = limit.costs
        empty = costs.layer(self.hidden, 0, 0)
        entries: dict[int, float] = {}
        for number, each in enumerate(self.layers):
            entries[self.kept(number)] = empty
            for place, units in zip(self.heads(number), each.heads, strict=True):
                entries[place] = costs.layer(self.hidden, units, 0) - empty
            for place, units in zip(self.ffn(number), each.ffn, strict=True):
                entries[place] = costs.layer(self.hidden, 0, units) - empty
        return self.row(entries, -np.inf, limit.most - costs.base(self.hidden))

    def consistent(self) -> list[Row]:
        """Returns the constraints of one option of each kind per kept layer, and none for removed layers."""
        return [
            self.row({self.kept(number): -1} | dict.fromkeys(places, 1), 0, 0)
            for number in range(len(self.layers))
            for places in (self.heads(number), self.ffn(number))
        ]

    def alike(self) -> list[Row]:
        """Returns the constraints of equal options in kept layers: for each pair, |a - b| <= 2 - both kept."""
        rows = []
        for first in range(len(self.layers)):
            for second in range(first + 1, len(self.layers)):
                kept = {self.kept(first): 1.0, self.kept(second): 1.0}
                for places in (self.heads, self.ffn):
                    for a, b in zip(places(first), places(second), strict=True):
                        rows += [self.row(kept | {a: x, b: -x}, -np.inf, 2) for x in (1.0, -1.0)]
        return rows

    def fixed(self, among: Sequence[int]) -> list[Row]:
        return [self.row({self.kept(number): 1}, 1, 1) for number in among]

    def read(self, solution: np.ndarray) -> Choice:
        chosen = solution > 0.5
        kept = [number for number in range(len(self.layers)) if chosen[self.kept(number)]]
        heads = tuple(self.picked(chosen, self.heads(n), self.layers[n].heads) for n in kept)
        ffn = tuple(self.picked(chosen, self.ffn(n), self.layers[n].ffn) for n in kept)
        cost = self.costs.base(self.hidden) + sum(
            self.costs.layer(self.hidden, h, f) for h, f in zip(heads, ffn, strict=True)
        )
        loss = float(self.losses() @ chosen) + sum(each.layer_loss for each in self.layers)
        return Choice(tuple(kept), heads, ffn, loss, cost)

    @staticmethod
    def picked(chosen: np.ndarray, places: range, units: Sequence[int]) -> int:
        return next(size for place, size in zip(places, units, strict=True) if chosen[place])
