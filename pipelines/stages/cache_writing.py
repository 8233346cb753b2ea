"""Writes caches with a forecast and a progress bar, on one or on several processes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from compress.prune.slicing.checkpoint import load_pruned
from distill.cache import Identity, Samples, plan_cache, write_cache
from distill.cache.plan import BATCH_TOKENS
from distill.cache.preflight import Forecast, Teacher
from distill.cache.signals import Signal
from distill.cache.writer import Written
from distill.teacher.fingerprint import frozen
from distill.teacher.shard import SharedTeacher
from pipelines.runs.console import Console
from pipelines.runs.processes import World


def load_teacher(folder: Path) -> PreTrainedModel:
    """Loads a frozen teacher with the head that it was saved with."""
    return frozen(load_pruned(folder))


def answers_of(signals: tuple[Signal, ...]) -> tuple[str, ...]:
    """Returns the names of the teacher outputs that the signals need."""
    return tuple(dict.fromkeys(name for signal in signals for name in signal.needs))


def forecast_line(expected: Forecast) -> str:
    return (
        f"  cache: {expected.samples:,} samples, {expected.tokens:,} tokens to ask about: about "
        f"{expected.disk_bytes / 1e6:,.1f} MB on disk ({expected.free_bytes / 1e9:,.0f} GB free), "
        f"{expected.seconds:,.0f} s, {expected.memory_bytes / 1e6:,.0f} MB of memory beside the teacher"
    )


def write_with_progress(
    console: Console,
    folder: Path,
    identity: Identity,
    samples: Samples,
    teacher: Teacher,
    *,
    batch_tokens: int = BATCH_TOKENS,
    force: bool = False,
    made_from: Mapping[str, Any] | None = None,
    rank: int = 0,
    ranks: int = 1,
    in_step: bool = False,
) -> Written:
    """Calls `write_cache` and prints its forecast, a progress bar, and a line for each repaired shard."""
    with console.track("cache: asking the teacher", len(set(samples.keys))) as advance:
        written = write_cache(
            folder,
            identity,
            samples,
            teacher,
            rank=rank,
            ranks=ranks,
            batch_tokens=batch_tokens,
            force=force,
            made_from=made_from,
            in_step=in_step,
            on_forecast=lambda expected: console.say(forecast_line(expected)),
            on_progress=advance,
        )
    for damage in written.damaged:
        console.say(f"  cache: {damage}; computed again")
    return written


def write_together(
    console: Console,
    world: World,
    folder: Path,
    identity: Identity,
    samples: Samples,
    teacher: Teacher,
    mesh: DeviceMesh | None,
    **settings: Any,
) -> Written:
    """Calls `write_with_progress` on every process of the world.

    `mesh` is that of a sharded teacher, which all processes must query together.
    """
    place: dict[str, Any] = {"rank": world.rank, "ranks": world.size}
    if mesh is None:
        written = write_with_progress(console, folder, identity, samples, teacher, **place, **settings)
        world.barrier()
        return written
    shared = SharedTeacher(teacher, mesh)
    if world.is_rank_zero:
        plan_cache(
            folder, identity, samples, shared, on_forecast=lambda expected: console.say(forecast_line(expected)),
            **settings,
        )  # fmt: skip
    shared.finish()
    world.barrier()
    written = write_with_progress(console, folder, identity, samples, shared, in_step=True, **place, **settings)
    shared.finish()
    world.barrier()
    return written
