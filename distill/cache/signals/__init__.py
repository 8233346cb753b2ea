"""Kinds of signals that a cache can hold."""

from collections.abc import Mapping
from typing import Any

from distill.cache.signals.dense import Dense
from distill.cache.signals.features import Hidden, Relations
from distill.cache.signals.generated import Generated
from distill.cache.signals.sampled import Sampled
from distill.cache.signals.signal import Signal, SignalMask, TeacherOutputs
from distill.cache.signals.topk import TopK

KINDS: dict[str, type[Signal]] = {kind.kind: kind for kind in (Dense, TopK, Sampled, Hidden, Relations, Generated)}

__all__ = [
    "KINDS",
    "TeacherOutputs",
    "Dense",
    "Generated",
    "Hidden",
    "Relations",
    "Sampled",
    "Signal",
    "TopK",
    "SignalMask",
]


def build_signal(settings: Mapping[str, Any]) -> Signal:
    """Rebuilds a signal from its `Signal.settings`."""
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()
    }
    return KINDS[fields.pop("kind")](**fields)
