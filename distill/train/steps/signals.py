"""The teacher's signals for a training step: read from the batch or the teacher, and checked."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from distill.data.batches.encode import Batch
from distill.data.batches.loss_mask import loss_mask
from distill.errors import InputError
from distill.losses.config import LossConfig
from distill.losses.teacher_signals import TeacherSignals
from distill.models.output_head import count_vocabulary_classes
from distill.tasks.logit_rows import select_distribution_settings
from distill.train.steps.batch_entries import find_signals
from distill.train.steps.layer_terms import LayerTerms

SignalReader = Callable[[Batch], Mapping[str, object]]  # a padded batch -> the teacher's signals


def read_signals(
    batch: Batch, reader: SignalReader | None, loss: LossConfig, layer_terms: LayerTerms
) -> TeacherSignals:
    """Returns the teacher's signals for a batch, checked; empty if no term needs a teacher.

    Args:
        batch: Its own `signals` are used if it has any.
        reader: Queried otherwise.
        loss: Enabled terms.
        layer_terms: The layers that they compare.

    Raises:
        InputError: There are no signals, they lack a layer, or they are not finite.
    """
    if not loss.needs_teacher:
        return TeacherSignals()
    signals = find_signals(batch)
    if signals is None and reader is not None:
        signals = cast(TeacherSignals, reader(batch))
    if signals is None:
        raise InputError(
            "loss: expected signals for the terms that read the teacher, found none: pass signals, or batches that "
            "contain them"
        )
    layers = layer_terms.find_needed_layers(signals)
    check_signals(signals, batch, layers, outputs=loss.computes("kl") or loss.uses_vectors)
    return signals


def find_distribution_settings(student: nn.Module, signals: TeacherSignals) -> TeacherSignals:
    """Returns the temperature of stored distributions and the teacher's number of classes, if there are any."""
    return select_distribution_settings(signals) | count_vocabulary_classes(student, signals)


def check_signals(
    signals: TeacherSignals,
    batch: Mapping[str, Tensor],
    layers: Mapping[str, Sequence[int]] | None = None,
    *,
    outputs: bool = True,
) -> None:
    """Checks that every value that the student is trained on is finite, with a single device synchronization.

    Args:
        signals: The teacher's signals for the padded batch.
        batch: The batch.
        layers: The layers of `hidden` and `relations` that the terms need.
        outputs: Whether the terms need logits or text vectors.

    Raises:
        InputError: A requested position contains NaN or infinity. Logits may be minus infinity, as in a vocabulary's
            padding, but not for an entire row.
    """
    outcomes = [*(_check_outputs(signals, batch) if outputs else ()), *_check_layers(signals, batch, layers or {})]
    if not outcomes or torch.stack([finite.all() for _, finite in outcomes]).all():
        return
    name, finite = next((name, finite) for name, finite in outcomes if not finite.all())
    raise InputError(
        f"teacher: expected finite {name}, found {int((~finite).sum())} of {finite.numel()} rows with NaN or infinity: "
        "every weight of the student would be NaN after this step"
    )


def _check_outputs(signals: TeacherSignals, batch: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yields the name of each output and, per row or position, whether its values are usable."""
    if "logits" in signals:
        # The maximum of a row is NaN if any value is, and minus infinity only if all values are.
        yield "logits", _ignore_unrequested(signals["logits"].amax(-1).isfinite(), loss_mask(batch))
    if "embedding" in signals:
        yield "embedding", signals["embedding"].isfinite().all(-1)


def _check_layers(
    signals: TeacherSignals, batch: Mapping[str, Tensor], layers: Mapping[str, Sequence[int]]
) -> Iterator[tuple[str, Tensor]]:
    """Yields the name of each layer's output and, per position, whether its values are finite."""
    tokens = batch["attention_mask"].bool()
    for layer in layers.get("hidden", ()):
        finite = signals["hidden"][layer].isfinite().all(-1)
        yield f"hidden states of layer {layer}", _ignore_unrequested(finite, tokens)
    for layer in layers.get("relations", ()):
        for name, vectors in zip(("queries", "keys", "values"), signals["relations"][layer], strict=True):
            yield f"{name} of layer {layer}", _ignore_unrequested(vectors.isfinite().all(-1), tokens)


def _ignore_unrequested(finite: Tensor, mask: Tensor) -> Tensor:
    """Returns `finite` with all positions outside `mask` set to True; values there are never used."""
    return finite | ~mask.to(finite.device) if finite.shape == mask.shape else finite
