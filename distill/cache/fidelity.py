"""Measures how closely cached targets match the dense teacher's, including the student's gradient under both."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from distill.cache.plan import Samples
from distill.checkpoint.layers import find_layer_lists, select_layer_settings
from distill.checkpoint.outputs import find_logits
from distill.errors import InputError
from distill.losses.teacher_signals import SignalSource, TeacherSignals
from distill.models.inputs import select_inputs
from distill.tasks.logit_rows import OutputRows, select_distribution_settings

BINS = 15
SignalLoss = Callable[[Tensor, TeacherSignals], Tensor]


@dataclass(frozen=True)
class Fidelity:
    """Deviation of cached targets from the dense teacher's.

    Args:
        kl: Mean KL in nats at the cache's temperature, in the direction that is finite: KL(dense ‖ cached) for dense
            logits and top-k (with the tail spread evenly), KL(cached ‖ dense) for a sample.
        sampled: Whether the cached targets are a sample, which is exact on average over draws, but not for a single
            draw.
        gradient_angle: Mean over batches of the angle between the student's gradients under both targets, in degrees.
        calibration_error: Expected calibration error of the cached targets: over bins of the likeliest cached id's
            probability, the mean difference from the dense probability of the same id.
        positions, batches: Number of positions and batches measured.
    """

    kl: float
    sampled: bool
    gradient_angle: float
    calibration_error: float
    positions: int
    batches: int


def measure_fidelity(
    cached: SignalSource,
    teacher: SignalSource,
    student: PreTrainedModel,
    samples: Samples,
    batches: Sequence[Sequence[int]],
    loss: SignalLoss,
    output_rows: OutputRows | None = None,
) -> Fidelity:
    """Compares a cache with its teacher on some batches of samples, at the temperature of the cache.

    Args:
        cached: The cache's reader.
        teacher: Returns the dense `logits` of a padded batch.
        student: The model whose gradient is compared; its weights are left unchanged.
        samples: The samples that the cache was written for.
        batches: Sample numbers of each batch.
        loss: Maps (student logits [rows, width], targets) to the training loss. The targets include their
            `temperature`, by which dense logits aren't divided yet.
        output_rows: Defines the rows of the logits if they are neither samples nor positions.

    Raises:
        InputError: The cache holds no distribution.
    """
    kl, angles, confidences, references, count = 0.0, [], [], [], 0
    sampled, output_rows = False, output_rows or OutputRows()
    for rows in batches:
        batch = dict(samples.batch(rows))
        signals = cached(batch)
        stored = _select_distribution(signals)
        if "logits" in stored:
            stored["logits"] = output_rows.logits(batch, stored["logits"])
        settings, raw = (
            select_distribution_settings(signals),
            output_rows.logits(batch, teacher(batch)["logits"]).float(),
        )
        dense = raw / settings.get("temperature", 1.0)
        sampled = "weights" in stored
        kl += compute_divergence(dense, stored).sum().item()
        count += len(dense)
        confidence, reference = _find_top_probabilities(dense, stored)
        confidences.append(confidence)
        references.append(reference)
        gradients = [
            _compute_gradient(student, batch, loss, targets | settings, output_rows)
            for targets in (TeacherSignals(logits=raw), stored)
        ]
        angles.append(measure_angle(*gradients))
    error = _compute_calibration_error(torch.cat(confidences).numpy(), torch.cat(references).numpy())
    return Fidelity(kl / count, sampled, float(np.mean(angles)), error, count, len(batches))


def _select_distribution(signals: TeacherSignals) -> TeacherSignals:
    """Returns the signals that describe a distribution.

    Raises:
        InputError: There are none.
    """
    names = ("logits", "ids", "weights", "log_probs", "tail")
    stored = {name: value for name, value in signals.items() if name in names}
    if not stored:
        raise InputError(
            "cache: expected logits, topk or sampled, found features only: fidelity is defined for distributions"
        )
    return cast(TeacherSignals, stored)


def compute_divergence(
    dense: Float[Tensor, "positions vocabulary"], stored: TeacherSignals
) -> Float[Tensor, "positions"]:
    """Returns the KL of each position in nats; see `Fidelity.kl` for its direction."""
    log_p = dense.log_softmax(-1)
    if "logits" in stored:
        gap = log_p - stored["logits"].log_softmax(-1)
        return torch.where(log_p.exp() > 0, log_p.exp() * gap, 0.0).sum(-1)
    stored_log_p = log_p.gather(-1, stored["ids"])
    if "weights" in stored:
        weights = stored["weights"]
        return torch.where(weights > 0, weights * (weights.clamp(min=1e-12).log() - stored_log_p), 0.0).sum(-1)
    others = dense.shape[-1] - stored["ids"].shape[-1]
    log_q = torch.full_like(log_p, -np.inf)
    if others:
        log_q[:] = (stored["tail"].clamp(min=1e-12) / others).log()[:, None]
    log_q.scatter_(-1, stored["ids"], stored["log_probs"])
    return torch.where(log_p.exp() > 0, log_p.exp() * (log_p - log_q), 0.0).sum(-1)


def _find_top_probabilities(
    dense: Float[Tensor, "positions vocabulary"], stored: TeacherSignals
) -> tuple[Float[Tensor, "positions"], Float[Tensor, "positions"]]:
    """Returns the cached target's largest probability and the teacher's probability of the same id."""
    p = dense.softmax(-1)
    if "logits" in stored:
        confidence, ids = stored["logits"].softmax(-1).max(-1, keepdim=True)
    else:
        mass = stored["weights"] if "weights" in stored else stored["log_probs"].exp()
        confidence, column = mass.max(-1, keepdim=True)
        ids = stored["ids"].gather(-1, column)
    return confidence[:, 0], p.gather(-1, ids)[:, 0]


def _compute_calibration_error(confidence: np.ndarray, reference: np.ndarray) -> float:
    """Returns the expected calibration error over BINS equal bins (Guo et al. 2017, arXiv 1706.04599, equation 3)."""
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    gaps = [
        abs(confidence[bins == b].mean() - reference[bins == b].mean()) * (bins == b).mean() for b in np.unique(bins)
    ]
    return float(sum(gaps))


def _compute_gradient(
    student: PreTrainedModel,
    batch: dict[str, Tensor],
    loss: SignalLoss,
    targets: TeacherSignals,
    output_rows: OutputRows,
) -> list[Tensor | None]:
    """Returns the gradient of the loss by each trained parameter, None for those that it doesn't depend on."""
    logits = find_logits(student(**select_inputs(batch)))
    assert logits is not None
    trained = [p for p in student.parameters() if p.requires_grad]
    value = loss(output_rows.logits(batch, logits), targets)
    return list(torch.autograd.grad(value, trained, allow_unused=True))


def measure_angle(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> float:
    """Returns the angle in degrees between two gradients, each a list of tensors that is flattened into one vector."""
    pairs = [
        (x.double().flatten(), y.double().flatten())
        for x, y in zip(a, b, strict=True)
        if x is not None and y is not None
    ]
    dot = sum(float(x @ y) for x, y in pairs)
    norms = np.sqrt(sum(float(x @ x) for x, _ in pairs)) * np.sqrt(sum(float(y @ y) for _, y in pairs))
    return float(np.degrees(np.arccos(np.clip(dot / max(norms, 1e-30), -1, 1))))


def halve_layers(teacher: PreTrainedModel) -> PreTrainedModel:
    """Returns the default student, a copy of the teacher with the first half of its layers.

    Raises:
        InputError: The model has no list of all its layers, or several.
    """
    student: PreTrainedModel = copy.deepcopy(teacher)
    student.eval().requires_grad_(True)
    lists = find_layer_lists(student)
    if len(lists) != 1:
        raise InputError(
            f"{type(teacher).__name__}: expected one list of its layers, found {len(lists)}: they can't be halved; "
            "name a student with --student"
        )
    stack = cast(nn.ModuleList, student.get_submodule(lists[0]))
    kept = range(max(1, len(stack) // 2))
    del stack[len(kept) :]
    select_layer_settings(student.config, kept)
    student.config.use_cache = False
    return student
