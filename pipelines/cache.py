"""`python -m pipelines.cache`: writes, inspects, verifies and repairs a cache of teacher signals."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill.checkpoint.checkpoint import Checkpoint, open_checkpoint
from distill.errors import InputError
from distill.parallel.layout import parse_layout
from pipelines.runs import cli
from pipelines.runs.console import Console
from pipelines.runs.launch import launch_processes
from pipelines.runs.processes import World, count_processes, is_distributed, join_world, leave_world
from pipelines.settings.cache_config import SHORT, InspectConfig, RebuildConfig, VerifyConfig, WriteConfig
from pipelines.settings.places import check_data, open_local

if TYPE_CHECKING:
    from distill.cache import CacheReader
    from distill.cache.format.store import Store
    from distill.parallel.layout import Layout
    from pipelines.stages.cached_signals import Job

EXAMPLES = {
    "write": """\
  python -m pipelines.cache write --teacher my_llama/ --data books/ --cache caches/lm --data.max_length 512
  python -m pipelines.cache write --teacher T --data books/ --cache C --signals sampled,hidden --draws 48 --layers 6,12
  python -m pipelines.cache write --teacher T --data books/ --cache C --dry-run
  # several writers share the work, by hand on one or more machines, or a process a GPU:
  python -m pipelines.cache write … --rank 0 --ranks 2 & python -m pipelines.cache write … --rank 1 --ranks 2
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
    "write": "Ask a teacher about a text and keep its signals; run it again to go on after a kill, or to add text.",
    "inspect": "Say what a cache holds: signals, teacher, tokens, bytes a token, coverage, fidelity.",
    "verify": "Read every byte of a cache and name the samples of each that changed; exit code 1 if there are any.",
    "rebuild": "Compute again what is damaged or missing, and nothing else.",
}
SHOWN = 20  # maximum number of faults listed individually


def main(argv: Sequence[str]) -> None:
    commands: dict[str, Callable[[Sequence[str]], None]] = {
        "write": write,
        "inspect": inspect,
        "verify": verify,
        "rebuild": rebuild,
    }
    if not argv or argv[0] in ("-h", "--help"):
        lines = "\n".join(f"  {name:8} {ABOUT[name]}" for name in commands)
        print(f"usage: python -m pipelines.cache COMMAND [options]\n\n{lines}\n\nCOMMAND --help tells its options")
        return
    if argv[0] not in commands:
        raise InputError(f"expected a command among {', '.join(commands)}, found {argv[0]!r}")
    commands[argv[0]](argv[1:])


def parsed(command: str, config: type, argv: Sequence[str]) -> Any:
    short = SHORT if command == "write" else {}
    return cli.parse(
        config, argv, prog=f"pipelines.cache {command}", about=ABOUT[command], examples=EXAMPLES[command], short=short
    )


def write(argv: Sequence[str]) -> None:
    config = parsed("write", WriteConfig, argv)
    open_local(config.teacher, "teacher")
    check_data(config.data.path, config.data.subset)
    parse_layout(config.layout, config.devices if not is_distributed() else count_processes(), "layout")

    from pipelines.stages.cached_signals import open_teacher, prepare_job, record

    opened = open_teacher(config)
    if config.devices > 1 and not is_distributed() and not config.dry_run:
        check_layout(config, opened.checkpoint, config.devices)
        launch_processes("pipelines.cache", ["write", *argv], config.devices)
        return
    world, console = join_world(config.timeout), Console()
    layout = check_layout(config, opened.checkpoint, world.size)
    from pipelines.stages.data import say_reading

    set_threads(config.threads)
    mesh = None
    if layout.sharded:
        from distill.parallel.mesh import build_mesh
        from pipelines.runs.placement import detect_device_type

        mesh = build_mesh(layout, detect_device_type())
    job = prepare_job(opened, layout, mesh, world)
    say_reading(console, config.data)
    console.say(f"task: {job.task}{job.note}; {len(job.samples):,} samples, {int(job.samples.lengths.sum()):,} tokens")
    if config.dry_run:
        dry_run(console, config, job)
        return
    if world.size == 1:
        fill(console, config, job, record(config))
    else:
        from pipelines.runs.watchdog import explain_failures

        with explain_failures(world):
            fill_together(console, config, job, world, mesh)
    leave_world()


def check_layout(config: WriteConfig, teacher: Checkpoint, processes: int) -> "Layout":
    """Returns the teacher's layout, checked before any process loads weights.

    Raises:
        InputError: The layout doesn't fit the processes or the model, or a device other than the machine's default is
            requested for a sharded teacher.
    """
    from distill.parallel.layout import check_model_fits
    from pipelines.runs.placement import detect_device_type

    layout = parse_layout(config.layout, processes, "layout")
    check_model_fits(layout, teacher.config, "layout")
    if layout.sharded and config.device not in ("auto", detect_device_type()):
        raise InputError(
            f"--device {config.device!r}: a teacher in parts lies on {detect_device_type()} here; leave it out"
        )
    from distill.checkpoint.config import load_config
    from distill.checkpoint.folder import checkpoint_folder
    from distill.parallel.layout import check_model_fits
    from pipelines.runs.placement import detect_device_type

    layout = parse_layout(config.layout, processes, "layout")
    check_model_fits(layout, load_config(checkpoint_folder(config.teacher), "teacher"), "layout")
    if layout.sharded and config.device not in ("auto", detect_device_type()):
        raise InputError(
            f"--device {config.device!r}: a teacher in parts lies on {detect_device_type()} here; leave it out"
        )
    return layout


def fill_together(console: Console, config: WriteConfig, job: "Job", world: World, mesh: Any) -> None:
    from distill.cache.format.store import open_store
    from pipelines.stages.cache_writing import write_together
    from pipelines.stages.cached_signals import record

    write_together(
        console,
        world,
        Path(config.cache),
        job.identity,
        job.samples,
        job.teacher,
        mesh,
        batch_tokens=config.batch_tokens,
        force=config.force,
        made_from=record(config),
    )
    if world.is_rank_zero:
        show(console, open_store(Path(config.cache)))


def fill(console: Console, config: WriteConfig, job: "Job", made_from: dict[str, Any]) -> None:
    from distill.cache.format.store import open_store
    from pipelines.stages.cache_writing import write_with_progress

    written = write_with_progress(
        console,
        Path(config.cache),
        job.identity,
        job.samples,
        job.teacher,
        batch_tokens=config.batch_tokens,
        force=config.force,
        made_from=made_from,
        rank=config.rank,
        ranks=config.ranks,
    )
    if written.computed == 0:
        console.say("  cache: nothing was missing")
    show(console, open_store(Path(config.cache)))


def dry_run(console: Console, config: WriteConfig, job: "Job") -> None:
    from distill.cache.format.store import ABOUT, open_store
    from distill.cache.plan import cut_shards, select_new_rows
    from distill.cache.preflight import forecast, measure, table_bytes
    from pipelines.stages.cache_writing import forecast_line

    folder, signals = Path(config.cache), job.identity.signals
    known = open_store(folder, job.identity).index.contains if (folder / ABOUT).exists() else None
    rows = select_new_rows(job.samples, known)
    if rows:
        measurement, books = measure(job.teacher, job.samples, rows, job.identity, config.batch_tokens)
        lengths = job.samples.lengths[rows]
        a_shard = int(lengths.sum()) // len(cut_shards(lengths, signals))
        tables = 0 if known else table_bytes(books)
        console.say(forecast_line(forecast(folder, measurement, lengths, len(signals), a_shard, tables)))
    else:
        console.say("  cache: it has a place for every sample already")
    console.say("dry run: nothing was written")


def inspect(argv: Sequence[str]) -> None:
    config = parsed("inspect", InspectConfig, argv)
    from distill.cache import CacheReader
    from distill.cache.format.store import open_store
    from pipelines.stages.cached_signals import open_teacher, prepare_job, recorded

    set_threads(config.threads)
    console, folder = Console(), Path(config.cache)
    store = open_store(folder)
    show(console, store)
    if not store.about.get("made_from") and not config.fidelity:
        return
    reader = CacheReader(folder)
    job = prepare_job(open_teacher(recorded(folder, store.about, teacher=config.teacher, data=config.data)))
    held = reader.contains(job.samples.keys)
    console.say(f"coverage: {int(held.sum()):,} of {len(held):,} samples of the data ({held.mean():.1%})")
    if config.fidelity:
        show_fidelity(console, config, reader, job)


def show(console: Console, store: "Store") -> None:
    """Prints a table that describes a cache."""
    from distill.cache.format.shard import shard_path

    folder = store.folder
    there = [n for n in range(len(store.shard_rows)) if shard_path(folder, n).is_file()]
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    rows = [
        ("signals", "; ".join(described(signal.settings()) for signal in store.identity.signals)),
        ("teacher", f"weights {store.identity.teacher[:16]}, {store.about.get('made_from', {}).get('teacher', '')}"),
        ("tokenizer", store.identity.tokenizer[:16]),
        ("preprocessing", store.identity.preprocessing or "none"),
        ("samples", f"{len(store.index):,}"),
        ("tokens", f"{store.about['tokens']:,}"),
        ("shards", f"{len(there)} of {len(store.shard_rows)} written"),
        ("bytes", f"{size:,}"),
        ("bytes a token", f"{size / max(1, store.about['tokens']):.2f}, everything in the folder counted"),
        ("folder", str(folder)),
    ]
    console.table("Cache", ("what", "found"), rows)


def described(settings: dict[str, Any]) -> str:
    rest = ", ".join(f"{name} {value}" for name, value in settings.items() if name not in ("kind", "of"))
    return f"{settings.get('of', settings['kind'])} ({rest})"


def show_fidelity(console: Console, config: InspectConfig, reader: "CacheReader", job: "Job") -> None:
    import numpy as np

    from distill.cache.fidelity import fidelity, halve_layers
    from distill.cache.preflight import spread_batches
    from distill.losses.compose import distribution_loss
    from distill.tasks.choose import TASKS
    from distill.teacher.online import OnlineTeacher

    model, task = job.model, TASKS[job.task](())
    named = open_checkpoint(config.student, "student") if config.student else None
    student = halve_layers(model) if named is None else task.load_checkpoint(named.folder)
    rows = np.flatnonzero(reader.contains(job.samples.keys))
    if not len(rows):
        raise InputError(f"cache {config.cache!r}: holds no sample of the data: there is nothing to compare")
    lengths = [int(job.samples.lengths[i]) for i in rows]
    batches = spread_batches(lengths, reader.store.batch_tokens, config.fidelity)
    found = fidelity(
        reader,
        OnlineTeacher(model),
        student,
        job.samples,
        [[int(rows[i]) for i in batch] for batch in batches],
        lambda logits, targets: distribution_loss(logits, targets, targets.get("temperature", 1.0)),
        task.answers,
    )
    kl = "KL(cached, dense), one draw" if found.sampled else "KL(dense, cached)"
    lines = [
        (kl, f"{found.kl:.5f} nats"),
        ("angle of the student's gradients", f"{found.angle:.2f} degrees, mean of {found.batches} batches"),
        ("expected calibration error", f"{found.calibration:.4f} against the dense teacher"),
        ("measured on", f"{found.positions:,} positions"),
    ]
    console.table("Fidelity", ("what", "found"), lines)


def verify(argv: Sequence[str]) -> None:
    config = parsed("verify", VerifyConfig, argv)
    from distill.cache.verify import verify as faults_of

    console = Console()
    faults = faults_of(Path(config.cache))
    for fault in faults[:SHOWN]:
        named = ", ".join(fault.samples[:3]) + (f" and {len(fault.samples) - 3} more" if len(fault.samples) > 3 else "")
        samples = f": {len(fault.samples)} samples ({named})" if fault.samples else ""
        console.say(f"{fault.file} bytes {fault.start:,} to {fault.end:,}: {fault.reason}{samples}")
    if len(faults) > SHOWN:
        console.say(f"and {len(faults) - SHOWN} more")
    if faults:
        console.say(f"{len(faults)} faults; `python -m pipelines.cache rebuild --cache {config.cache}` mends them")
        raise SystemExit(1)
    console.say(f"cache {config.cache}: every byte is what was written")


def rebuild(argv: Sequence[str]) -> None:
    config = parsed("rebuild", RebuildConfig, argv)
    from distill.cache.format.store import lock_plan, open_store, repair_files
    from pipelines.stages.cached_signals import open_teacher, prepare_job, recorded

    set_threads(config.threads)
    console, folder = Console(), Path(config.cache)
    if not folder.is_dir():
        raise InputError(f"cache {str(folder)!r}: no such folder: not a cache")
    with lock_plan(folder):
        repaired = repair_files(folder)
    for name in repaired:
        console.say(f"  cache: {name} taken from its other copy")
    about = open_store(folder).about
    settings = recorded(folder, about, teacher=config.teacher, data=config.data)
    fill(console, settings, prepare_job(open_teacher(settings)), dict(about["made_from"]))


def set_threads(threads: int) -> None:
    if threads:
        import torch

        torch.set_num_threads(threads)


if __name__ == "__main__":
    cli.run(main)
