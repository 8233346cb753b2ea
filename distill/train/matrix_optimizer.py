"""What optimizers have in common that treat the matrices of layers in a way of their own."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


class MatrixOptimizer(Optimizer):
    """An optimizer whose groups say in `matrices` whether they contain 2-D parameters of layers only."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates all parameters that have a gradient; returns the loss of the closure, if one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self.update_group(group)
        return loss

    @abstractmethod
    def update_group(self, group: dict[str, Any]) -> None:
        """Updates the parameters of a group that have a gradient."""
