"""The layouts that a model may have on some machines."""

from collections.abc import Iterator

from transformers import PretrainedConfig

from distill.errors import InputError
from distill.parallel.layout import Layout, check_model_fits
from pipelines.planner.hardware import Hardware

MOST_STAGES = 8  # pipeline stages at most: more idle for longer than they compute, with four micro-batches


def list_layouts(hardware: Hardware, model: PretrainedConfig, *, trained: bool, segments: bool = False) -> list[Layout]:
    """Returns the layouts on all devices that a model of this config can have.

    Products and rows are split within a node only: what they exchange is waited for in each layer.

    Args:
        hardware: The machines.
        model: The model's config.
        trained: Whether the model is trained, so that gradients and optimizer states may be sharded alone.
        segments: Whether the positions of a row may be divided among processes.
    """
    count = hardware.processes
    if count == 1:
        return [Layout()]
    layouts = [Layout(dp=count)]
    layouts += [Layout(dp=count, zero=zero) for zero in (1, 2) if trained]
    layouts.append(Layout(fsdp=count))
    layouts += [Layout(dp=count // shards, fsdp=shards) for shards in divide(count) if hardware.devices % shards == 0]
    for parts in (*divide(hardware.devices), hardware.devices):
        others = count // parts
        layouts += [Layout(tp=parts)] if others == 1 else [Layout(fsdp=others, tp=parts), Layout(dp=others, tp=parts)]
        if segments:
            layouts += (
                [Layout(cp=parts)] if others == 1 else [Layout(fsdp=others, cp=parts), Layout(dp=others, cp=parts)]
            )
    layouts += [Layout(pp=stages, dp=count // stages) for stages in (*divide(count), count) if stages <= MOST_STAGES]
    unique = dict.fromkeys(layout for layout in layouts if layout.processes == count)
    return [layout for layout in unique if can_have(layout, model)]


def divide(count: int) -> Iterator[int]:
    """Yields the divisors of a number between 1 and itself."""
    yield from (number for number in range(2, count) if count % number == 0)


def can_have(layout: Layout, model: PretrainedConfig) -> bool:
    """Returns whether heads and layers can be divided as a layout requests."""
    try:
        check_model_fits(layout, model, "layout")
    except InputError:
        return False
    return True
