"""Allocation of a latency budget at the lowest estimated loss: kept layers, with their heads and neurons."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from compress.errors import CompressError
from compress.prune.search.cost import CostModel, ModelSizes, predict_slowest

# Nodes of the solver's search tree: unlike a limit of seconds, this doesn't make shapes depend on the machine's load.
NODE_LIMIT = 20_000


@dataclass(frozen=True)
class LayerOptions:
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
    maximum: float


@dataclass(frozen=True)
class Allocation:
    """The kept layers and the units of each."""

    layers: tuple[int, ...]
    heads: tuple[int, ...]
    ffn: tuple[int, ...]
    loss: float
    milliseconds: float


def allocate(
    layers: Sequence[LayerOptions],
    costs: Sequence[CostModel],
    hidden: int,
    depth: int,
    milliseconds: float,
    *,
    uniform: bool = False,
    fixed_layers: Sequence[int] | None = None,
    size: Limit | None = None,
) -> Allocation | None:
    """Returns the allocation of lowest estimated loss with `depth` layers within `milliseconds`, None if infeasible.

    Args:
        layers: Options of every layer of the full model.
        costs: Cost models of the latency; none of them may exceed `milliseconds`.
        hidden: Width of the residual stream.
        depth: Number of layers to keep.
        milliseconds: Maximum latency of a call.
        uniform: Whether every layer gets the same sizes.
        fixed_layers: Layers to keep; None leaves the selection to the solver.
        size: A further limit, on bytes.

    Source: ZipLM (Kurtic et al. 2023, arXiv 2302.04089, section 3.2) chooses among blocks of measured latency by
        dynamic programming; here it is a mixed-integer linear programme, solved by HiGHS through SciPy.
    """
    limits = [Limit(each, milliseconds) for each in costs] + ([size] if size is not None else [])
    if uniform:
        return allocate_uniformly(layers, costs, hidden, depth, limits, fixed_layers)
    from scipy.optimize import Bounds, LinearConstraint, milp

    programme = _Programme(layers, costs, hidden)
    rows = [programme.keep_layers(depth), *programme.choose_one_option()]
    rows += [programme.limit_cost(limit) for limit in limits]
    if fixed_layers is not None:
        rows += programme.fix_layers(fixed_layers)
    matrix, low, high = (np.array(column) for column in zip(*rows, strict=True))
    result = milp(
        programme.make_objective(),
        constraints=LinearConstraint(matrix, low, high),
        integrality=np.ones(programme.size),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 1e-6, "node_limit": NODE_LIMIT},
    )
    return programme.read_solution(result.x) if result.x is not None else None


def allocate_uniformly(
    layers: Sequence[LayerOptions],
    costs: Sequence[CostModel],
    hidden: int,
    depth: int,
    limits: Sequence[Limit],
    fixed_layers: Sequence[int] | None,
) -> Allocation | None:
    """Returns the best allocation whose layers all have the same sizes: every pair of shared options is tried.

    All kept layers cost the same, so that those with the least loss are kept.

    Raises:
        CompressError: No number of heads, or of neurons, is an option of every layer.
    """
    best: Allocation | None = None
    heads_losses = share_options("heads", hidden, [(each.heads, each.heads_loss) for each in layers])
    ffn_losses = share_options("neurons", hidden, [(each.ffn, each.ffn_loss) for each in layers])
    for (heads, heads_loss), (ffn, ffn_loss) in product(heads_losses.items(), ffn_losses.items()):
        sizes = ModelSizes(hidden, (heads,) * depth, (ffn,) * depth)
        if any(limit.costs.predict(sizes) > limit.maximum for limit in limits):
            continue
        losses = zip(heads_loss, ffn_loss, layers, strict=True)
        saved = [of_heads + of_ffn - each.layer_loss for of_heads, of_ffn, each in losses]
        kept = sorted(
            sorted(range(len(layers)), key=saved.__getitem__)[:depth] if fixed_layers is None else fixed_layers
        )
        loss = sum(saved[number] for number in kept) + sum(each.layer_loss for each in layers)
        if best is None or loss < best.loss:
            best = Allocation(tuple(kept), sizes.heads, sizes.ffn, loss, predict_slowest(costs, sizes))
    return best


def share_options(
    name: str, hidden: int, options: Sequence[tuple[Sequence[int], Sequence[float]]]
) -> dict[int, tuple[float, ...]]:
    """Returns size -> the loss of each layer, of the sizes that every layer may have.

    Args:
        name: What is counted.
        hidden: Width of the residual stream.
        options: The sizes of each layer and their losses.

    Raises:
        CompressError: The layers share no size.
    """
    by_size = [dict(zip(*each, strict=True)) for each in options]
    shared = [size for size in by_size[0] if all(size in losses for losses in by_size)]
    if not shared:
        found = ", ".join(str(max(losses)) for losses in by_size)
        raise CompressError(
            f"budget.uniform: expected a number of {name} that every layer can have at width {hidden}, found layers "
            f"with at most {found}: a stock class has layers of equal sizes; leave --uniform out, or prune the model "
            "that this one was pruned from"
        )
    return {size: tuple(losses[size] for losses in by_size) for size in shared}


CostRow = tuple[np.ndarray, float, float]


class _Programme:
    """The binary variables of `allocate`: for each layer, one for keeping it and one per option of heads and of ffn."""

    def __init__(self, layers: Sequence[LayerOptions], costs: Sequence[CostModel], hidden: int):
        self.layers, self.costs, self.hidden = layers, costs, hidden
        self.starts = np.concatenate([[0], np.cumsum([1 + len(each.heads) + len(each.ffn) for each in layers])])
        self.size = int(self.starts[-1])

    def keep_variable(self, layer: int) -> int:
        return int(self.starts[layer])

    def head_variables(self, layer: int) -> range:
        first = int(self.starts[layer]) + 1
        return range(first, first + len(self.layers[layer].heads))

    def ffn_variables(self, layer: int) -> range:
        return range(self.head_variables(layer).stop, int(self.starts[layer + 1]))

    def make_row(self, entries: Mapping[int, float], low: float, high: float) -> CostRow:
        values = np.zeros(self.size)
        for variable, value in entries.items():
            values[variable] = value
        return values, low, high

    def make_objective(self) -> np.ndarray:
        """Returns the objective: a kept layer saves its own loss and adds the losses of its options."""
        values = np.zeros(self.size)
        for number, each in enumerate(self.layers):
            values[self.keep_variable(number)] = -each.layer_loss
            values[list(self.head_variables(number))] = each.heads_loss
            values[list(self.ffn_variables(number))] = each.ffn_loss
        return values

    def keep_layers(self, count: int) -> CostRow:
        """Returns the constraint of `count` kept layers."""
        return self.make_row({self.keep_variable(number): 1 for number in range(len(self.layers))}, count, count)

    def limit_cost(self, limit: Limit) -> CostRow:
        """Returns the constraint of a limit, in which an option costs what it adds to a layer without units."""
        costs = limit.costs
        empty = costs.layer(self.hidden, 0, 0)
        entries: dict[int, float] = {}
        for number, each in enumerate(self.layers):
            entries[self.keep_variable(number)] = empty
            for variable, units in zip(self.head_variables(number), each.heads, strict=True):
                entries[variable] = costs.layer(self.hidden, units, 0) - empty
            for variable, units in zip(self.ffn_variables(number), each.ffn, strict=True):
                entries[variable] = costs.layer(self.hidden, 0, units) - empty
        return self.make_row(entries, -np.inf, limit.maximum - costs.base(self.hidden))

    def choose_one_option(self) -> list[CostRow]:
        """Returns the constraints of one option of each kind per kept layer, and none for removed layers."""
        return [
            self.make_row({self.keep_variable(number): -1} | dict.fromkeys(variables, 1), 0, 0)
            for number in range(len(self.layers))
            for variables in (self.head_variables(number), self.ffn_variables(number))
        ]

    def fix_layers(self, fixed_layers: Sequence[int]) -> list[CostRow]:
        """Returns the constraints that keep these layers."""
        return [self.make_row({self.keep_variable(number): 1}, 1, 1) for number in fixed_layers]

    def read_solution(self, solution: np.ndarray) -> Allocation:
        chosen = solution > 0.5
        kept_layers = [number for number in range(len(self.layers)) if chosen[self.keep_variable(number)]]
        heads = tuple(self.read_size(chosen, self.head_variables(n), self.layers[n].heads) for n in kept_layers)
        ffn = tuple(self.read_size(chosen, self.ffn_variables(n), self.layers[n].ffn) for n in kept_layers)
        cost = predict_slowest(self.costs, ModelSizes(self.hidden, heads, ffn))
        loss = float(self.make_objective() @ chosen) + sum(each.layer_loss for each in self.layers)
        return Allocation(tuple(kept_layers), heads, ffn, loss, cost)

    @staticmethod
    def read_size(chosen: np.ndarray, variables: range, sizes: Sequence[int]) -> int:
        return next(size for variable, size in zip(variables, sizes, strict=True) if chosen[variable])
