"""Muon for the matrices of layers, AdamW for everything else, as one optimizer."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from distill.train.matrix_optimizer import MatrixOptimizer

_COEFFICIENTS, _ITERATIONS = (3.4445, -4.7750, 2.0315), 5


class Muon(MatrixOptimizer):
    """Updates matrices by their orthogonalized momentum, scaled to the size of an update of AdamW.

    torch.optim.Muon takes matrices only and computes in bfloat16, which takes tens of times as long on a CPU without
    bfloat16 units: here CPUs compute in float32, and the other parameters are trained by AdamW.

    Args:
        params: Groups; those with `matrices` True contain 2-D parameters only.
        lr: Learning rate of groups without one, as large as AdamW's.
        momentum: Of the matrices.
        betas, eps: Of AdamW for the other groups.
        weight_decay: Decoupled, of groups without one.

    Source: Jordan 2024, Muon: An optimizer for hidden layers (kellerjordan.github.io/posts/muon); the scale 0.2 · √(the
        longer side) is that of Liu et al. 2025, Muon is Scalable for LLM Training (arXiv 2502.16982), section 2.2.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float,
        *,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ):
        settings: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, settings | {"momentum": momentum, "matrices": False})

    def update_group(self, group: dict[str, Any]) -> None:
        """Updates the parameters of a group that have a gradient."""
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        if group["matrices"]:
            for parameter in parameters:
                self._update_matrix(parameter, parameter.grad, group)
        else:
            self._update_others(parameters, group)

    def _update_matrix(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        state["momentum"].lerp_(gradient, 1 - group["momentum"])
        update = orthogonalize(gradient.lerp(state["momentum"], group["momentum"]))  # Nesterov's
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"] * 0.2 * max(parameter.shape) ** 0.5)

    def _update_others(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                self.state[parameter] = zeros | {"step": torch.zeros(())}
        states = [self.state[parameter] for parameter in parameters]
        adamw(
            parameters,
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def orthogonalize(matrix: Tensor) -> Tensor:
    """Returns a matrix of the same singular vectors whose singular values are about 1, by Newton-Schulz iterations."""
    x = matrix.to(torch.float32 if matrix.device.type == "cpu" else torch.bfloat16)
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    norm: Tensor = torch.linalg.vector_norm(x)
    x = x / norm.clamp(min=1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.T if is_tall else x).to(matrix.dtype)
