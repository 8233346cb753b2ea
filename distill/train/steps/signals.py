"""What a teacher says in a step, checked before a student learns from it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from distill.data.batches.share import spoken_of
from distill.errors import InputError


def check_said(
    signals: Mapping[str, Any],
    batch: Mapping[str, Tensor],
    layers: Mapping[str, Sequence[int]] | None = None,
    *,
    outputs: bool = True,
) -> None:
    """Looks at every number that the student is to learn, once, and waits for a device once.

    Args:
        signals: The teacher's, of the padded batch.
        layers: Of `hidden` and `relations`, those that are read.
        outputs: Whether logits, or vectors of texts, are read.

    Raises:
        InputError: NaN or infinity where the teacher is asked. Logits may be minus infinity, as of a vocabulary's
            padding, but not all of a row.
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
    """Names, and of each row or position whether what is said there can be learnt."""
    if "logits" in signals:
        # Of a row the largest is NaN if any is, and minus infinity if all are.
        yield "logits", where_asked(signals["logits"].amax(-1).isfinite(), spoken_of(batch))
    if "embedding" in signals:
        yield "embedding", signals["embedding"].isfinite().all(-1)


def checked_layers(
    signals: Mapping[str, Any], batch: Mapping[str, Tensor], layers: Mapping[str, Sequence[int]]
) -> Iterator[tuple[str, Tensor]]:
    tokens = batch["attention_mask"].bool()
    for layer in layers.get("hidden", ()):
        yield f"hidden states of layer {layer}", where_asked(signals["hidden"][layer].isfinite().all(-1), tokens)
    for layer in layers.get("relations", ()):
        for name, each in zip(("queries", "keys", "values"), signals["relations"][layer], strict=True):
            yield f"{name} of layer {layer}", where_asked(each.isfinite().all(-1), tokens)


def where_asked(good: Tensor, mask: Tensor) -> Tensor:
    """What is said at other positions, where there is any, is good whatever it is."""
    return good | ~mask.to(good.device) if good.shape == mask.shape else good
