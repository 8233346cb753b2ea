"""The trace of a deep model from those of two shallow ones: layers are alike, so that everything grows by the layer."""

from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

from pipelines.planner.trace import StepTrace

SHALLOW = (3, 4)  # layers, of each pipeline stage half as many: FSDP's prefetch needs some before they look alike
_Key = TypeVar("_Key", bound=Hashable)


def trace_deep(trace: Callable[[int], StepTrace], layers: int, stages: int = 1) -> StepTrace:
    """Returns the trace of a model with this number of layers.

    Args:
        trace: Traces the model with fewer layers.
        layers: Number of layers; of a few, the model itself is traced.
        stages: Number of pipeline stages.
    """
    few, more = (count * max(1, stages // 2) for count in SHALLOW)
    if layers <= more:
        return trace(layers)
    low, high = trace(few), trace(more)
    steps = (layers - few) / (more - few)

    def extrapolate(before: Mapping[_Key, int], after: Mapping[_Key, int]) -> dict[_Key, int]:
        names = dict.fromkeys([*before, *after])
        return {name: round(before.get(name, 0) + steps * (after.get(name, 0) - before.get(name, 0))) for name in names}

    numbers = extrapolate({"held": low.held, "flops": low.flops}, {"held": high.held, "flops": high.flops})
    return StepTrace(
        settle_debts(extrapolate(low.memory, high.memory)),
        numbers["held"],
        numbers["flops"],
        extrapolate(low.sent, high.sent),
        extrapolate(low.calls, high.calls),
        high.stretch,
    )


def settle_debts(memory: dict[str, int]) -> dict[str, int]:
    """Returns the memory with the same sum and no kind below 0.

    The two traced models may use the most memory at different moments, with other kinds of it.
    """
    owed = -sum(size for size in memory.values() if size < 0)
    settled = {name: max(0, size) for name, size in memory.items()}
    for name in sorted(settled, key=lambda name: settled[name], reverse=True):
        paid = min(owed, settled[name])
        settled[name], owed = settled[name] - paid, owed - paid
    return settled
