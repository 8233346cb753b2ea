"""Writes caches with a forecast and a progress bar, on one or on several processes."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from distill.cache import Identity, Samples, plan_cache, write_cache
from distill.cache.faults import ShardFault, find_faults
from distill.cache.format.store import open_store
from distill.cache.plan import BATCH_TOKENS
from distill.cache.preflight import Forecast, Teacher
from distill.cache.signals import Signal
from distill.cache.writer import WriteResult, fill_cache
from distill.checkpoint.custom_models import load_model_folder
from distill.teacher.fingerprint import freeze
from distill.teacher.shard import ShardedTeacher
from pipelines.runs.console import Console
from pipelines.runs.processes import World

PROGRESS = "cache: querying the teacher"  # title of the progress bar


def load_teacher(folder: Path) -> PreTrainedModel:
    """Loads a frozen teacher with the head that it was saved with."""
    return freeze(load_model_folder(folder))


def list_needed_outputs(signals: tuple[Signal, ...]) -> tuple[str, ...]:
    """Returns the names of the teacher outputs that the signals need."""
    return tuple(dict.fromkeys(name for signal in signals for name in signal.needs))


def describe_forecast(expected: Forecast) -> str:
    """Returns a line about the samples that are missing, and what it takes to write them."""
    return (
        f"  cache: {expected.samples:,} samples, {expected.tokens:,} tokens to compute: about "
        f"{expected.disk_bytes / 1e6:,.1f} MB on disk ({expected.free_bytes / 1e9:,.0f} GB free), "
        f"{expected.seconds:,.0f} s, {expected.memory_bytes / 1e6:,.0f} MB of memory besides the teacher"
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
) -> WriteResult:
    """Calls `write_cache` and prints its forecast, a progress bar, and a line for each repaired shard."""
    with console.track(PROGRESS, len(set(samples.keys))) as advance:
        result = write_cache(
            folder,
            identity,
            samples,
            teacher,
            rank=rank,
            ranks=ranks,
            batch_tokens=batch_tokens,
            force=force,
            made_from=made_from,
            on_forecast=lambda expected: console.say(describe_forecast(expected)),
            on_progress=advance,
        )
    report_damage(console, result)
    return result


def report_damage(console: Console, result: WriteResult) -> None:
    """Prints a line for each damaged shard that was computed again."""
    for damage in result.damaged_shards:
        console.say(f"  cache: {damage}; computed again")


def write_together(
    console: Console,
    world: World,
    folder: Path,
    identity: Identity,
    samples: Samples,
    teacher: Teacher,
    mesh: DeviceMesh | None,
    **settings: Any,
) -> WriteResult:
    """Writes a cache on every process of the world.

    The first process plans the cache and checks the existing shards for all processes. `mesh` is that of a sharded
    teacher, which all processes must query together.
    """
    shared = None if mesh is None else ShardedTeacher(teacher, mesh)
    teacher = shared or teacher
    store, fault_dicts = None, None
    if world.is_rank_zero:
        store = plan_cache(
            folder, identity, samples, teacher, on_forecast=lambda expected: console.say(describe_forecast(expected)),
            **settings,
        )  # fmt: skip
        fault_dicts = [asdict(fault) for fault in find_faults(store)]
    if shared is not None:
        shared.finish()
    faults = [ShardFault(**each) for each in world.broadcast(fault_dicts)]
    world.share_files()
    store = store or open_store(folder, identity)
    with console.track(PROGRESS, len(set(samples.keys))) as advance:
        result = fill_cache(
            store, samples, teacher, faults,
            rank=world.rank, ranks=world.size, lockstep=shared is not None, on_progress=advance,
        )  # fmt: skip
    report_damage(console, result)
    if shared is not None:
        shared.finish()
    world.share_files()
    return result
