"""Scores of difficulty of rows, from a teacher's answers or from its training; higher is harder."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from distill.losses.logits import row_expectation

_EARLY = 0.2  # share of the epochs after which EL2N is taken


def entropy(logits: Float[Tensor, "rows classes"]) -> Float[Tensor, "rows"]:
    """Returns the entropy of each answer in nats."""
    logs = torch.log_softmax(logits.float(), -1)
    return -row_expectation(logs, logs)


def margin(logits: Float[Tensor, "rows classes"]) -> Float[Tensor, "rows"]:
    """Returns 1 - (p of the most probable class - p of the second)."""
    best = torch.softmax(logits.float(), -1).topk(2).values
    return 1 - (best[:, 0] - best[:, 1])


def compute_label_loss(logits: Float[Tensor, "rows classes"], labels: Int[Tensor, "rows"]) -> Float[Tensor, "rows"]:
    """Returns the cross-entropy of each row's label in nats."""
    losses: Tensor = torch.nn.functional.cross_entropy(logits.float(), labels, reduction="none")
    return losses


def el2n(logits: Float[Tensor, "epochs rows classes"], labels: Int[Tensor, "rows"]) -> Float[Tensor, "rows"]:
    """Returns ‖p - y‖₂ after the first fifth of the epochs, at least one.

    Source:
        Paul et al., "Deep Learning on a Data Diet" (NeurIPS 2021), definition 2.2; one training instead of the mean of
        ten.
    """
    epoch = max(1, round(_EARLY * len(logits))) - 1
    wanted = torch.nn.functional.one_hot(labels, logits.shape[-1])
    errors: Tensor = torch.softmax(logits[epoch].float(), -1) - wanted
    return errors.square().sum(-1).sqrt()


def forgetting(logits: Float[Tensor, "epochs rows classes"], labels: Int[Tensor, "rows"]) -> Float[Tensor, "rows"]:
    """Returns how often a row was answered rightly after an epoch and wrongly after the next.

    A row that was never answered rightly has the number of epochs. Rows with the same number are ordered by their
    mean cross-entropy, which counts for less than one event.

    Source:
        Toneva et al., "An Empirical Study of Example Forgetting during Deep Neural Network Learning" (ICLR 2019),
        section 3, with events between epochs instead of batches; the order of equal rows is ours.
    """
    right = logits.argmax(-1) == labels
    events = (right[:-1] & ~right[1:]).sum(0).float()
    events[~right.any(0)] = len(logits)
    losses = torch.stack([compute_label_loss(each, labels) for each in logits]).mean(0)
    return events + losses / (1 + losses.max())


def area_under_margin(
    logits: Float[Tensor, "epochs rows classes"], labels: Int[Tensor, "rows"]
) -> Float[Tensor, "rows"]:
    """Returns minus the mean over epochs of (logit of the label - largest other logit).

    Source:
        Pleiss et al., "Identifying Mislabeled Data using the Area Under the Margin Ranking" (NeurIPS 2020), equation 1,
        with the sign changed.
    """
    index = labels[None, :, None].expand(len(logits), -1, 1)
    label_logits = logits.gather(-1, index).squeeze(-1)
    others = logits.scatter(-1, index, -torch.inf).max(-1).values
    return (others - label_logits).float().mean(0)


DYNAMICS = {"el2n": el2n, "forgetting": forgetting, "aum": area_under_margin}
