"""Random logits, labels and masks, and a comparison of a loss with its textbook definition in float64."""

from collections.abc import Callable

import torch
from torch import Tensor

from distill.losses.logits import IGNORED


def draw(*shape: int, seed: int, scale: float = 3.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def draw_labels(rows: int, classes: int) -> Tensor:
    """Returns labels of which every third is ignored, beginning with the second."""
    labels = torch.randint(0, classes, (rows,), generator=torch.Generator().manual_seed(9))
    labels[1::3] = IGNORED
    return labels


def draw_mask(batch: int, length: int) -> Tensor:
    lengths = 1 + torch.arange(batch) * (length - 1) // max(1, batch - 1)
    return (torch.arange(length) < lengths[:, None]).long()


def softmax(logits: Tensor) -> Tensor:
    powers = (logits - logits.max(-1, keepdim=True).values).exp()
    return powers / powers.sum(-1, keepdim=True)


def same_value_and_gradient(ours: Callable, book: Callable, student: Tensor, tolerance: float = 2e-5) -> None:
    """Checks that `ours` in float32 agrees with `book` in float64 in value and gradient at `student`."""
    x, y = student.clone().requires_grad_(), student.double().requires_grad_()
    value, wanted = ours(x), book(y)
    torch.testing.assert_close(value.double(), wanted, rtol=tolerance, atol=1e-6)
    (grad,), (wanted_grad,) = torch.autograd.grad(value, x), torch.autograd.grad(wanted, y)
    scale = wanted_grad.abs().max().clamp(min=1e-3)
    torch.testing.assert_close(grad.double() / scale, wanted_grad / scale, rtol=0, atol=tolerance)
