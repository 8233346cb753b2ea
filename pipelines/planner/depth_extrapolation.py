"""The trace of a deep model from those of two shallow ones: layers are alike, so that everything grows by the layer."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from distill.parallel.layout import Layout
from pipelines.planner.trace import StepTrace

SHALLOW = (2, 3)  # layers of the models that are traced: a first one may differ from the others
SHALLOW_WITH_FSDP = (3, 4)  # likewise: its prefetch needs some before they look alike
_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True)
class ExtrapolatedTrace:
    """The trace of a model, and the one of a shallower model that it was extended from.

    Args:
        whole: Of the model.
        shallow: Of the model with few layers.
        layers: Number of these.
    """

    whole: StepTrace
    shallow: StepTrace
    layers: int


def extrapolate_depth(trace: Callable[[int], StepTrace], layers: int, layout: Layout) -> ExtrapolatedTrace:
    """Returns the trace of a model with this number of layers.

    Args:
        trace: Traces the model with fewer layers.
        layers: Number of layers; of a few, the model itself is traced.
        layout: Its layout.
    """
    few, more = SHALLOW_WITH_FSDP if layout.uses_fsdp else SHALLOW
    if layers <= more:
        return trace_exactly(trace, layers)
    low, high = trace(few), trace(more)
    return ExtrapolatedTrace(add_difference(low, low, high, (layers - few) / (more - few)), low, few)


def trace_exactly(trace: Callable[[int], StepTrace], layers: int) -> ExtrapolatedTrace:
    """Returns the trace of a model that isn't extended from a shallower one."""
    whole = trace(layers)
    return ExtrapolatedTrace(whole, whole, layers)


def add_difference(trace: StepTrace, before: StepTrace, after: StepTrace, times: float = 1.0) -> StepTrace:
    """Returns a trace plus the difference of two others times a factor."""

    def add(base: Mapping[_Key, int], old: Mapping[_Key, int], new: Mapping[_Key, int]) -> dict[_Key, int]:
        names = dict.fromkeys([*base, *old, *new])
        return {name: round(base.get(name, 0) + times * (new.get(name, 0) - old.get(name, 0))) for name in names}

    return StepTrace(
        spread_negative_sizes(add(trace.memory, before.memory, after.memory)),
        round(trace.held_bytes + times * (after.held_bytes - before.held_bytes)),
        trace.work.add(after.work.add(before.work, -1), times),
        add(trace.sent, before.sent, after.sent),
        add(trace.calls, before.calls, after.calls),
        after.stretch,
    )


def spread_negative_sizes(memory: dict[str, int]) -> dict[str, int]:
    """Returns the memory with the same sum and no kind below 0; negative sizes are taken from the largest kinds.

    The two traced models may use the most memory at different moments, with other kinds of it.
    """
    missing = -sum(size for size in memory.values() if size < 0)
    sizes = {name: max(0, size) for name, size in memory.items()}
    for name in sorted(sizes, key=lambda name: sizes[name], reverse=True):
        taken = min(missing, sizes[name])
        sizes[name], missing = sizes[name] - taken, missing - taken
    return sizes
