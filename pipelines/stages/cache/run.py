"""Fills the cache of a prepared job on one or several processes, or forecasts what that takes."""

from collections.abc import Mapping
from pathlib import Path

from torch.distributed.device_mesh import DeviceMesh

from distill.cache.format.store import CACHE_JSON, open_store
from distill.cache.plan import assign_shards, select_new_rows
from distill.cache.preflight import count_table_bytes, forecast_cost, measure_cost
from distill.checkpoint.checkpoint import Checkpoint
from distill.errors import InputError
from distill.parallel.layout import Layout, check_model_fits, parse_layout
from pipelines.runs.console import Console
from pipelines.runs.placement import detect_device_type
from pipelines.runs.processes import World
from pipelines.settings.commands.cache import WriteConfig
from pipelines.stages.cache.inspection import print_cache
from pipelines.stages.cache.job import Job
from pipelines.stages.cache.record import record_settings
from pipelines.stages.cache.writing import describe_forecast, write_together, write_with_progress


def check_layout(config: WriteConfig, teacher: Checkpoint, processes: int) -> Layout:
    """Returns the teacher's layout, checked before any process loads weights.

    Raises:
        InputError: The layout doesn't fit the processes or the model, or has cp, or a device other than the machine's
            default is requested for a sharded teacher.
    """
    layout = parse_layout(config.layout, processes, "layout")
    if layout.cp > 1:
        raise InputError(
            f"layout {layout}: expected replicated, fsdp, tp or pp, found cp: a cache stores the signals of whole texts"
        )
    check_model_fits(layout, teacher.config, "layout")
    default = detect_device_type()
    if layout.sharded and config.accelerator not in ("auto", default):
        raise InputError(
            f"--accelerator: expected {default} or auto, found {config.accelerator!r}: a sharded teacher is on "
            f"{default} here"
        )
    return layout


def write_on_one_process(
    console: Console, config: WriteConfig, job: Job, made_from: Mapping[str, object] | None = None
) -> None:
    """Writes the missing shards in this process, and prints a description of the cache.

    `made_from` are the settings that are stored in the cache; by default those of `config`.
    """
    written = write_with_progress(
        console,
        Path(config.cache),
        job.identity,
        job.samples,
        job.teacher,
        batch_tokens=config.batch_tokens,
        force=config.force,
        made_from=record_settings(config) if made_from is None else made_from,
        rank=config.writer,
        ranks=config.writers,
    )
    if written.computed_shards == 0:
        console.say("  cache: nothing was missing")
    print_cache(console, open_store(Path(config.cache)))


def write_on_all_processes(
    console: Console, config: WriteConfig, job: Job, world: World, mesh: DeviceMesh | None
) -> None:
    """Writes the missing shards on all processes; the first one prints a description of the cache."""
    folder = Path(config.cache)
    write_together(
        console,
        world,
        folder,
        job.identity,
        job.samples,
        job.teacher,
        mesh,
        batch_tokens=config.batch_tokens,
        force=config.force,
        made_from=record_settings(config),
    )
    if world.is_rank_zero:
        print_cache(console, open_store(folder))


def print_forecast(console: Console, config: WriteConfig, job: Job) -> None:
    """Measures a few batches and prints the disk space, time and memory that the missing samples would take."""
    folder, signals = Path(config.cache), job.identity.signals
    is_known = open_store(folder, job.identity).index.contains if (folder / CACHE_JSON).exists() else None
    rows = select_new_rows(job.samples, is_known)
    if rows:
        measurement, books = measure_cost(job.teacher, job.samples, rows, job.identity, config.batch_tokens)
        lengths = job.samples.lengths[rows]
        shard_tokens = int(lengths.sum()) // len(assign_shards(lengths, signals))
        table_bytes = 0 if is_known else count_table_bytes(books)
        cost = forecast_cost(folder, measurement, lengths, len(signals), shard_tokens, table_bytes)
        console.say(describe_forecast(cost))
    else:
        console.say("  cache: every sample is planned already")
    console.say("dry run: nothing was written")
