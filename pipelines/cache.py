"""`python -m pipelines.cache`: writes, inspects, verifies and repairs a cache of teacher signals."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from distill.errors import InputError
from distill.parallel.layout import Layout, parse_layout
from pipelines.runs import cli
from pipelines.runs.console import Console
from pipelines.runs.launch import launch_processes
from pipelines.runs.processes import count_processes, is_distributed, join_world, leave_world
from pipelines.runs.ray_launcher import Workers, launch_on_ray
from pipelines.settings.commands.cache import (
    CACHE_SHORT_OPTIONS,
    InspectConfig,
    RebuildConfig,
    VerifyConfig,
    WriteConfig,
)
from pipelines.settings.places import check_data, open_local

_Config = TypeVar("_Config")
EXAMPLES = {
    "write": """\
  python -m pipelines.cache write --teacher my_llama/ --data books/ --cache caches/lm --data.max_length 512
  python -m pipelines.cache write --teacher T --data books/ --cache C --signals sampled,hidden --draws 48 --layers 6,12
  python -m pipelines.cache write --teacher T --data books/ --cache C --dry-run
  # several writers share the work, by hand on one or more machines, or a process a GPU:
  python -m pipelines.cache write … --writer 0 --writers 2 & python -m pipelines.cache write … --writer 1 --writers 2
  torchrun --nproc-per-node 8 -m pipelines.cache write …
  # a teacher too large for one process
  python -m pipelines.cache write … --devices 4 --layout fsdp=4""",
    "inspect": """\
  python -m pipelines.cache inspect --cache caches/lm
  python -m pipelines.cache inspect --cache caches/lm --data more_books/
  python -m pipelines.cache inspect --cache caches/lm --fidelity 8 --student runs/small""",
    "verify": "  python -m pipelines.cache verify --cache caches/lm",
    "rebuild": "  python -m pipelines.cache rebuild --cache caches/lm",
}
ABOUT = {
    "write": "Compute a teacher's signals for a text and store them; run it again to resume, or to add text.",
    "inspect": "Describe a cache: its signals, teacher, tokens, bytes per token, coverage and fidelity.",
    "verify": "Read every byte of a cache and list the samples whose bytes have changed; exit code 1 if there are any.",
    "rebuild": "Recompute what is damaged or missing, and nothing else.",
}
MAX_LISTED = 20  # maximum number of faults listed individually


def main(argv: Sequence[str]) -> None:
    """Runs the subcommand named by the first argument, with the remaining arguments."""
    commands: dict[str, Callable[[Sequence[str]], None]] = {
        "write": write,
        "inspect": inspect,
        "verify": verify,
        "rebuild": rebuild,
    }
    if not argv or argv[0] in ("-h", "--help"):
        lines = "\n".join(f"  {name:8} {ABOUT[name]}" for name in commands)
        print(f"usage: python -m pipelines.cache COMMAND [options]\n\n{lines}\n\nCOMMAND --help lists its options")
        return
    if argv[0] not in commands:
        raise InputError(f"expected a command among {', '.join(commands)}, found {argv[0]!r}")
    commands[argv[0]](argv[1:])


def parse_settings(command: str, config_class: type[_Config], argv: Sequence[str]) -> _Config:
    """Returns the settings of a subcommand."""
    short = CACHE_SHORT_OPTIONS if command == "write" else {}
    return cli.parse(
        config_class,
        argv,
        prog=f"pipelines.cache {command}",
        about=ABOUT[command],
        examples=EXAMPLES[command],
        short=short,
    )


def write(argv: Sequence[str]) -> None:
    """Writes a cache, or with `--dry-run` prints what it would take."""
    config = parse_settings("write", WriteConfig, argv)
    open_local(config.teacher, "teacher")
    check_data(config.data.path, config.data.subset)
    parse_layout(config.layout, config.devices if not is_distributed() else count_processes(), "layout")

    from pipelines.stages.cache.job import open_teacher, prepare_job
    from pipelines.stages.cache.run import check_layout, print_forecast, write_on_all_processes, write_on_one_process

    opened = open_teacher(config)
    starts = (config.devices > 1 or config.launcher == "ray") and not is_distributed()
    if starts and not config.dry_run:
        check_layout(config, opened.checkpoint, config.devices)
        if config.launcher == "ray":
            workers = Workers(config.devices, 0, config.threads, config.timeout, config.accelerator)
            launch_on_ray("pipelines.cache", ["write", *argv], workers, Path(config.cache))
        else:
            launch_processes("pipelines.cache", ["write", *argv], config.devices)
        return
    world, console = join_world(config.timeout), Console()
    layout = check_layout(config, opened.checkpoint, config.devices if starts else world.size)
    from pipelines.stages.prepare.data import print_reading_remarks

    set_threads(config.threads)
    mesh = None
    if starts:
        layout = Layout()  # a dry run measures on one process
    if layout.sharded:
        from distill.parallel.mesh import build_mesh
        from pipelines.runs.placement import detect_device_type

        mesh = build_mesh(layout, detect_device_type())
    job = prepare_job(opened, layout, mesh, world)
    print_reading_remarks(console, config.data)
    console.say(f"task: {job.task}{job.note}; {len(job.samples):,} samples, {int(job.samples.lengths.sum()):,} tokens")
    if config.dry_run:
        print_forecast(console, config, job)
        return
    if world.size == 1:
        write_on_one_process(console, config, job)
    else:
        from pipelines.runs.failure_reports import explain_failures

        with explain_failures(world):
            write_on_all_processes(console, config, job, world, mesh)
    leave_world()


def inspect(argv: Sequence[str]) -> None:
    """Prints what a cache contains and, if requested, how well it represents its teacher."""
    config = parse_settings("inspect", InspectConfig, argv)
    from distill.cache import CacheReader
    from distill.cache.format.store import open_store
    from pipelines.stages.cache.inspection import print_cache, print_fidelity
    from pipelines.stages.cache.job import open_teacher, prepare_job
    from pipelines.stages.cache.record import restore_settings

    set_threads(config.threads)
    console, folder = Console(), Path(config.cache)
    store = open_store(folder)
    print_cache(console, store)
    if not store.metadata.get("made_from") and not config.fidelity and not config.data:
        return
    reader = CacheReader(folder)
    settings = restore_settings(folder, store.metadata, teacher=config.teacher, data=config.data)
    job = prepare_job(open_teacher(settings))
    cached = reader.contains(job.samples.keys)
    console.say(f"coverage: {int(cached.sum()):,} of {len(cached):,} samples of the data ({cached.mean():.1%})")
    if config.fidelity:
        print_fidelity(console, config, reader, job)


def verify(argv: Sequence[str]) -> None:
    """Prints the faults of a cache; exits with code 1 if there are any."""
    config = parse_settings("verify", VerifyConfig, argv)
    from distill.cache.verify import verify_cache

    console = Console()
    faults = verify_cache(Path(config.cache))
    for fault in faults[:MAX_LISTED]:
        count = len(fault.samples)
        first = ", ".join(fault.samples[:3]) + (f" and {count - 3} more" if count > 3 else "")
        samples = f": {count} samples ({first})" if count else ""
        console.say(f"{fault.file} bytes {fault.start:,} to {fault.end:,}: {fault.reason}{samples}")
    if len(faults) > MAX_LISTED:
        console.say(f"and {len(faults) - MAX_LISTED} more")
    if faults:
        console.say(f"{len(faults)} faults; `python -m pipelines.cache rebuild --cache {config.cache}` repairs them")
        raise SystemExit(1)
    console.say(f"cache {config.cache}: all bytes are as they were written")


def rebuild(argv: Sequence[str]) -> None:
    """Recomputes the damaged and missing shards of a cache."""
    config = parse_settings("rebuild", RebuildConfig, argv)
    from distill.cache.format.store import lock_plan, open_store, repair_files, require_folder
    from pipelines.stages.cache.job import open_teacher, prepare_job
    from pipelines.stages.cache.record import restore_settings
    from pipelines.stages.cache.run import write_on_one_process

    set_threads(config.threads)
    console, folder = Console(), Path(config.cache)
    require_folder(folder)
    with lock_plan(folder):
        repaired = repair_files(folder)
    for name in repaired:
        console.say(f"  cache: {name} restored from its other copy")
    metadata = open_store(folder).metadata
    settings = restore_settings(folder, metadata, teacher=config.teacher, data=config.data)
    write_on_one_process(console, settings, prepare_job(open_teacher(settings)), metadata["made_from"])


def set_threads(threads: int) -> None:
    """Sets the number of PyTorch's CPU threads; 0 leaves it unchanged."""
    if threads:
        import torch

        torch.set_num_threads(threads)


if __name__ == "__main__":
    cli.run(main)
