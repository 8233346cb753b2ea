"""APOLLO: AdamW whose moments are kept for a random low-rank projection of each matrix's gradient."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from distill.train.matrix_optimizer import MatrixOptimizer

_MOST_GROWTH = 1.01  # of the update's norm from one step to the next


class Apollo(MatrixOptimizer):
    """Scales each channel of the gradient as AdamW scales its projection; other parameters than matrices get AdamW.

    The projection is drawn from a seed, so that a resumed run draws the same, and is not stored.

    Args:
        params: Groups; those with `matrices` True contain 2-D parameters only.
        lr: Learning rate of groups without one, as large as AdamW's.
        rank: Rows of the projected gradient; matrices whose shorter side is at most as long get AdamW.
        interval: Steps after which another projection is drawn.
        scale: Factor on the update of matrices.
        betas, eps, weight_decay: Those of AdamW.

    Source: Zhu et al. 2024, APOLLO: SGD-like Memory, AdamW-level Performance (arXiv 2412.05270), algorithm 1, with the
        limit on the norm's growth of its section 4.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float,
        *,
        rank: int = 32,
        interval: int = 200,
        scale: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ):
        projection: dict[str, Any] = {"rank": rank, "interval": interval, "scale": scale, "matrices": False}
        super().__init__(params, projection | {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def update_group(self, group: dict[str, Any]) -> None:
        """Updates the parameters of a group that have a gradient."""
        for number, parameter in enumerate(group["params"]):
            if parameter.grad is not None:
                self._update(parameter, parameter.grad, number, group)

    def _update(self, parameter: Tensor, gradient: Tensor, number: int, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        is_projected = group["matrices"] and min(parameter.shape) > group["rank"]
        step = int(state["step"]) if state else 0
        seed = (number << 32) + step // group["interval"]
        low = _project(gradient, group["rank"], seed) if is_projected else gradient
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(low), torch.zeros_like(low)
        state["step"] += 1
        (beta1, beta2), step = group["betas"], step + 1
        state["exp_avg"].lerp_(low, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(low, low, value=1 - beta2)
        scaled = state["exp_avg"] / (state["exp_avg_sq"].sqrt() / math.sqrt(1 - beta2**step) + group["eps"])
        scaled = scaled / (1 - beta1**step)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        if is_projected:
            scaled = _limit_growth(_scale_channels(gradient, low, scaled) * group["scale"], state)
        parameter.add_(scaled, alpha=-group["lr"])


def _project(gradient: Tensor, rank: int, seed: int) -> Tensor:
    """Returns the gradient with its shorter side projected to `rank` random directions."""
    generator = torch.Generator().manual_seed(seed % 2**63)
    side = min(gradient.shape)
    directions = torch.randn(rank, side, generator=generator).to(gradient) / math.sqrt(rank)
    return directions @ gradient if gradient.shape[0] == side else gradient @ directions.T


def _scale_channels(gradient: Tensor, low: Tensor, scaled: Tensor) -> Tensor:
    """Returns the gradient with each channel, an entry of the longer side, scaled as that of the projection was."""
    axis = 0 if gradient.shape[0] == min(gradient.shape) else 1
    before, after = (torch.linalg.vector_norm(each, dim=axis, keepdim=True) for each in (low, scaled))
    factors: Tensor = after / before.clamp(min=1e-30)
    return gradient * factors


def _limit_growth(update: Tensor, state: dict[str, Tensor]) -> Tensor:
    norm = torch.linalg.vector_norm(update)
    last = state.setdefault("norm", torch.zeros(()))  # of the last update that wasn't 0, which would limit all to 0
    if last > 0:
        limit = last * _MOST_GROWTH
        update = torch.where(norm > limit, update * (limit / norm.clamp(min=1e-30)), update)
        norm = torch.minimum(norm, limit)
    state["norm"] = torch.where(norm > 0, norm, last).to("cpu")
    return update
