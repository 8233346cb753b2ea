"""Biases of a classifier's classes, fitted to labelled rows that it wasn't trained on."""

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from distill.checkpoint.auto_class import AutoClass
from distill.errors import InputError
from distill.losses.logits import IGNORED
from distill.tasks.task import output_layer

_STEPS = 200  # of the optimizer, at most


def fit_class_biases(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns biases, float64 [classes], with which the classes' probabilities fit the labels better.

    The probabilities of `scale * logits + biases` are fitted by cross-entropy, with a standard normal prior on each
    bias and on the logarithm of the scale. The biases are returned for a scale of 1, so that the predicted classes are
    those of the fit while the logits keep their size. The prior keeps the bias of a class with few rows small.

    Args:
        logits: [rows, classes].
        labels: The rows' classes, int64 [rows]; those marked IGNORED are left out.

    Source: bias-corrected temperature scaling, Alexandari, Kundaje and Shrikumar 2020 (arXiv 1901.06852), who use no
        prior and keep the scale.
    """
    logits = logits.detach().double()
    biases = torch.zeros(logits.shape[1], dtype=torch.float64, requires_grad=True)
    log_scale = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([biases, log_scale], max_iter=_STEPS, line_search_fn="strong_wolfe")

    def compute_loss() -> Tensor:
        optimizer.zero_grad()
        scaled = log_scale.exp() * logits + biases
        loss = torch.nn.functional.cross_entropy(scaled, labels, ignore_index=IGNORED, reduction="sum")
        loss = loss + (biases.square().sum() + log_scale.square()) / 2
        loss.backward()
        return loss

    optimizer.step(compute_loss)
    return (biases / log_scale.exp()).detach()


def check_head_biases(config: PretrainedConfig, auto: AutoClass) -> None:
    """Checks that the output layer of models with this config has biases; `auto` is the task's auto class.

    Raises:
        InputError: It has none, as in decoders.
    """
    with torch.device("meta"):
        model = auto.from_config(config)
    if output_layer(model).bias is None:
        raise InputError(
            f"fit_class_biases: expected a classifier whose output layer has biases, found none in "
            f"{type(model).__name__}: its checkpoint couldn't store them"
        )


@torch.no_grad()
def add_class_biases(model: PreTrainedModel, biases: Tensor) -> None:
    """Adds biases [classes] to those of the output layer, in place; see `check_head_biases`."""
    bias = output_layer(model).bias
    bias.copy_(bias + biases.to(bias))
