"""A linear model of a pruned model's latency or size, fitted to measurements of a few sizes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from compress.errors import CompressError

if TYPE_CHECKING:
    from torch import Tensor

Count: TypeAlias = "int | Tensor"
_WIDTHS = (1.0, 0.5, 0.25)  # shares of the full hidden width at which costs are measured
# (layers, share of heads, share of ffn)
_MEASURED_SIZES = ((1, 1.0, 1.0), (2, 0.5, 0.25), (1, 0.25, 0.0625), (2, 1.0, 0.5))


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model, which determine its latency and its size in bytes.

    Args:
        hidden: Width of the residual stream.
        heads, ffn: Units of each kept layer, in order: attention heads (or key-value heads), ffn neurons.
    """

    hidden: int
    heads: tuple[int, ...]
    ffn: tuple[int, ...]

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> "ModelSizes":
        """Returns the sizes that `dataclasses.asdict` and JSON stored, among other entries or alone."""
        return cls(stored["hidden"], tuple(stored["heads"]), tuple(stored["ffn"]))

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self.heads)


@dataclass(frozen=True)
class CostModel:
    """Milliseconds per call, or bytes: a `base` of a width, and for each layer parts of its attention and its ffn.

    Args:
        coefficients: Of 1, hidden, and summed over layers 1, hidden, heads, heads x hidden, ffn, ffn x hidden.
        error: Median relative error on the models it was fitted to.
    """

    coefficients: tuple[float, ...]
    error: float

    def predict(self, sizes: ModelSizes) -> float:
        """Returns the predicted milliseconds per call, or bytes."""
        return float(compute_features(sizes) @ np.asarray(self.coefficients))

    def scale(self, factor: float) -> "CostModel":
        """Returns the costs times a factor."""
        return CostModel(tuple(factor * each for each in self.coefficients), self.error)

    def base(self, hidden: int) -> float:
        """Returns the cost of a model of this width without layers: embeddings, head, and overhead of the call."""
        return self.predict(ModelSizes(hidden, (), ()))

    def layer(self, hidden: int, heads: int, ffn: int) -> float:
        """Returns the cost that one layer adds."""
        return self.predict(ModelSizes(hidden, (heads,), (ffn,))) - self.base(hidden)


def predict_slowest(costs: Sequence[CostModel], sizes: ModelSizes) -> float:
    """Returns the highest of the predictions of several cost models."""
    return max(each.predict(sizes) for each in costs)


def list_cost_factors(hidden: Count, depth: int, heads: Count, ffn: Count) -> tuple[Count, ...]:
    """Returns the factors of the coefficients, from a width and sums over layers, as numbers or as tensors."""
    return 1, hidden, depth, depth * hidden, heads, heads * hidden, ffn, ffn * hidden


def round_width(full: int, share: float, step: int) -> int:
    """Returns a multiple of `step` near a share of the full width; a share of 1 is the full width itself."""
    return full if share == 1 else min(full, max(step, round(full * share / step) * step))


def compute_features(sizes: ModelSizes) -> np.ndarray:
    """Returns the factors of the coefficients for a model [coefficients]."""
    return np.array(list_cost_factors(sizes.hidden, sizes.depth, sum(sizes.heads), sum(sizes.ffn)), float)


def fit_costs(all_sizes: Sequence[ModelSizes], milliseconds: Sequence[float]) -> CostModel:
    """Fits a cost model by non-negative least squares on relative errors, since no part of a model has negative cost.

    Raises:
        CompressError: The times aren't all positive.

    Source: ZipLM (Kurtic et al. 2023, arXiv 2302.04089, section 3.2) keeps a table of block latencies; here the cost is
        linear between the measured sizes, so that any width can be queried after a dozen measurements.
    """
    from scipy.optimize import nnls

    times = np.asarray(milliseconds, float)
    if not (times > 0).all():
        raise CompressError(f"latency: expected times above 0 ms, found {times.min()}: nothing was measured")
    rows = np.stack([compute_features(sizes) for sizes in all_sizes])
    scale = np.where(rows.any(0), rows.max(0), 1)  # the features of a width that can't be pruned are all 0
    solution, _ = nnls(rows / times[:, None] / scale, np.ones(len(times)))
    coefficients = solution / scale
    error = float(np.median(np.abs(rows @ coefficients / times - 1)))
    return CostModel(tuple(coefficients), error)


def plan_measurements(full: ModelSizes, *, step: int, uniform: bool = False) -> list[ModelSizes]:
    """Returns the models to measure: some hidden widths, each with several sizes of the blocks of the first layers.

    Args:
        full: Sizes of the full model; hidden is 0 if the width can't be pruned.
        step: Hidden widths are multiples of it.
        uniform: Whether to restrict the plan to what a stock class can express: if the width
            can't be pruned, no heads are removed either.
    """
    all_sizes = []
    for share in _WIDTHS if full.hidden else _WIDTHS[:1]:
        hidden = round_width(full.hidden, share, step) if full.hidden else 0
        for layers, head_share, ffn_share in _MEASURED_SIZES:
            depth = min(layers, full.depth)
            head_share = 1.0 if uniform and not full.hidden else head_share
            heads = tuple(max(1, round(units * head_share)) for units in full.heads[:depth])
            ffn = tuple(max(1, round(units * ffn_share)) for units in full.ffn[:depth])
            all_sizes.append(ModelSizes(hidden, heads, ffn))
    return list(dict.fromkeys(all_sizes))
