"""Checks of a teacher's signals before a student is trained on them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from distill.data.batches.share import loss_mask
from distill.errors import InputError


def check_signals(
    signals: Mapping[str, Any],
    batch: Mapping[str, Tensor],
    layers: Mapping[str, Sequence[int]] | None = None,
    *,
    outputs: bool = True,
) -> None:
    """Checks that every value that the student is trained on is finite, with a single device synchronisation.

    Args:
        signals: The teacher's signals for the padded batch.
        layers: The layers of `hidden` and `relations` that the terms need.
        outputs: Whether the terms need logits or text vectors.

    Raises:
        InputError: A requested position contains NaN or infinity. Logits may be minus infinity, as in a vocabulary's
            padding, but not for an entire row.
    """
    read = {name: signals[name] for name in ("logits", "embedding") if outputs and name in signals}
    found = [*checked_outputs(read, batch), *checked_layers(signals, batch, layers or {})]
    if not found or torch.stack([good.all() for _, good in found]).all():
        return
    name, good = next((name, good) for name, good in found if not good.all())
    raise InputError(
        f"teacher: expected finite {name}, found {int((~good).sum())} of {good.numel()} rows with NaN or infinity: "
        "every weight of the student would be NaN after this step"
    )


def checked_outputs(signals: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yields the name of each output and, per row or position, whether its values are usable."""
    if "logits" in signals:
        # The maximum of a row is NaN if any value is, and minus infinity only if all values are.
        yield "logits", ignore_unrequested(signals["logits"].amax(-1).isfinite(), loss_mask(batch))
    if "embedding" in signals:
        yield "embedding", signals["embedding"].isfinite().all(-1)


def checked_layers(
    signals: Mapping[str, Any], batch: Mapping[str, Tensor], layers: Mapping[str, Sequence[int]]
) -> Iterator[tuple[str, Tensor]]:
    tokens = batch["attention_mask"].bool()
    for layer in layers.get("hidden", ()):
        yield f"hidden states of layer {layer}", ignore_unrequested(signals["hidden"][layer].isfinite().all(-1), tokens)
    for layer in layers.get("relations", ()):
        for name, each in zip(("queries", "keys", "values"), signals["relations"][layer], strict=True):
            yield f"{name} of layer {layer}", ignore_unrequested(each.isfinite().all(-1), tokens)


def ignore_unrequested(good: Tensor, mask: Tensor) -> Tensor:
    """Returns `good` with all positions outside `mask` set to True; values there are never used."""
    return good | ~mask.to(good.device) if good.shape == mask.shape else good
