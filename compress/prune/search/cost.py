"""What a pruned model will cost in time and bytes, told from its sizes by what was measured of a few others."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from compress.errors import CompressError

WIDTHS = (1.0, 0.5, 0.25)  # of the full hidden width, the plan of what is measured
BLOCKS = ((1, 1.0, 1.0), (2, 0.5, 0.25), (1, 0.25, 0.0625), (2, 1.0, 0.5))  # (layers, share of heads, share of ffn)


@dataclass(frozen=True)
class Outline:
    """Sizes of a model: all that its latency and its bytes depend on.

    Args:
        hidden: Width of the residual stream.
        heads, ffn: Units of each layer that is kept, in order: attention heads (or key-value heads), ffn neurons.
    """

    hidden: int
    heads: tuple[int, ...]
    ffn: tuple[int, ...]

    @property
    def depth(self) -> int:
        return len(self.heads)


@dataclass(frozen=True)
class CostModel:
    """Milliseconds a call as a sum over the parts: `base` of a width, and for each layer its attention and its ffn.

    Args:
        coefficients: Of 1, hidden, and summed over layers 1, hidden, heads, heads x hidden, ffn, ffn x hidden.
        error: Median relative error on the models it was fitted to.
    """

    coefficients: tuple[float, ...]
    error: float

    def predict(self, outline: Outline) -> float:
        """Milliseconds a call."""
        return float(features(outline) @ np.asarray(self.coefficients))

    def base(self, hidden: int) -> float:
        """What a model of this width costs without a layer: embeddings, head, the call itself."""
        return self.predict(Outline(hidden, (), ()))

    def layer(self, hidden: int, heads: int, ffn: int) -> float:
        """What one layer adds."""
        return self.predict(Outline(hidden, (heads,), (ffn,))) - self.base(hidden)


def parts(hidden: Any, depth: Any, heads: Any, ffn: Any) -> tuple[Any, ...]:
    """What the coefficients are multiplied by, from a width and sums over layers; of numbers or of tensors."""
    return 1, hidden, depth, depth * hidden, heads, heads * hidden, ffn, ffn * hidden


def width_of(whole: int, share: float, step: int) -> int:
    """A multiple of `step` near a share of the width, or the whole of it, whatever that is a multiple of."""
    return whole if share == 1 else min(whole, max(step, round(whole * share / step) * step))


def features(outline: Outline) -> np.ndarray:
    return np.array(parts(outline.hidden, outline.depth, sum(outline.heads), sum(outline.ffn)), float)


def fit_costs(outlines: Sequence[Outline], milliseconds: Sequence[float]) -> CostModel:
    """Non-negative least squares on relative errors: no part of a model gives time back.

    Raises:
        CompressError: Times that aren't positive.

    Source: ZipLM (Kurtic et al. 2023, arXiv 2302.04089, section 3.2) keeps a table of block latencies; this is linear
    between what was measured, so that any width can be asked for after a dozen measurements.
    """
    from scipy.optimize import nnls

    times = np.asarray(milliseconds, float)
    if not (times > 0).all():
        raise CompressError(f"latency: expected times above 0 ms, found {times.min()}: nothing was measured")
    rows = np.stack([features(outline) for outline in outlines])
    scale = np.where(rows.any(0), rows.max(0), 1)  # nothing goes with a width that can't be cut
    solution, _ = nnls(rows / times[:, None] / scale, np.ones(len(times)))
    coefficients = solution / scale
    error = float(np.median(np.abs(rows @ coefficients / times - 1)))
    return CostModel(tuple(coefficients), error)


def plan(full: Outline, *, step: int, uniform: bool = False) -> list[Outline]:
    """The models to measure: the widths WIDTHS, each with the blocks BLOCKS of the first layers.

    Args:
        full: The whole model; of one whose width can't be cut, that is 0.
        step: Hidden widths are multiples of it.
        uniform: Only what a stock class can express: no head goes where the width stays.
    """
    found = []
    for share in WIDTHS if full.hidden else WIDTHS[:1]:
        hidden = width_of(full.hidden, share, step) if full.hidden else 0
        for layers, of_heads, of_ffn in BLOCKS:
            depth = min(layers, full.depth)
            of_heads = 1.0 if uniform and not full.hidden else of_heads
            heads = tuple(max(1, round(units * of_heads)) for units in full.heads[:depth])
            ffn = tuple(max(1, round(units * of_ffn)) for units in full.ffn[:depth])
            found.append(Outline(hidden, heads, ffn))
    return list(dict.fromkeys(found))
