"""The trace of a deep model from those of two shallow ones: layers are alike, so that everything grows by the layer."""

from collections.abc import Callable, Mapping

from pipelines.planner.trace import StepTrace

SHALLOW = (4, 6)  # FSDP's prefetch needs some layers before they look alike


def trace_deep(trace: Callable[[int], StepTrace], layers: int) -> StepTrace:
    """Returns the trace of a model with this number of layers.

    Args:
        trace: Traces the model with fewer layers.
        layers: Number of layers; up to six, the model is traced itself.
    """
    few, more = SHALLOW
    if layers <= more:
        return trace(layers)
    low, high = trace(few), trace(more)
    steps = (layers - few) / (more - few)
    return StepTrace(
        _extrapolate(low.memory, high.memory, steps),
        round(low.flops + steps * (high.flops - low.flops)),
        _extrapolate(low.sent, high.sent, steps),
    )


def _extrapolate(low: Mapping[str, int], high: Mapping[str, int], steps: float) -> dict[str, int]:
    names = dict.fromkeys([*low, *high])
    return {name: round(low.get(name, 0) + steps * (high.get(name, 0) - low.get(name, 0))) for name in names}
