"""Tables that describe a cache: its contents, and its fidelity to the teacher."""

from collections.abc import Mapping

import numpy as np

from distill.cache import CacheReader
from distill.cache.fidelity import halve_layers, measure_fidelity
from distill.cache.format.shard import shard_path
from distill.cache.format.store import Store
from distill.cache.preflight import spread_batches
from distill.checkpoint.checkpoint import open_checkpoint
from distill.errors import InputError
from distill.losses.compose import distribution_loss
from distill.tasks.choose import TASKS
from distill.teacher.online import OnlineTeacher
from pipelines.runs.console import Console
from pipelines.runs.files import count_bytes
from pipelines.settings.commands.cache import InspectConfig
from pipelines.stages.cache.job import Job


def print_cache(console: Console, store: Store) -> None:
    """Prints a table of a cache's signals, teacher, size and shards."""
    folder, identity, tokens = store.folder, store.identity, store.metadata["tokens"]
    written = [number for number in range(len(store.shard_rows)) if shard_path(folder, number).is_file()]
    size = count_bytes(folder)
    rows = [
        ("signals", "; ".join(describe_signal(signal.settings()) for signal in identity.signals)),
        ("teacher", f"weights {identity.teacher[:16]}, {store.metadata.get('made_from', {}).get('teacher', '')}"),
        ("tokenizer", identity.tokenizer[:16]),
        ("preprocessing", identity.preprocessing or "none"),
        ("samples", f"{len(store.index):,}"),
        ("tokens", f"{tokens:,}"),
        ("shards", f"{len(written)} of {len(store.shard_rows)} written"),
        ("bytes", f"{size:,}"),
        ("bytes per token", f"{size / max(1, tokens):.2f}, including all files in the folder"),
        ("folder", str(folder)),
    ]
    console.table("Cache", ("property", "value"), rows)


def describe_signal(settings: Mapping[str, object]) -> str:
    """Returns a signal's name with its settings."""
    rest = ", ".join(f"{name} {value}" for name, value in settings.items() if name not in ("kind", "of"))
    return f"{settings.get('of', settings['kind'])} ({rest})"


def print_fidelity(console: Console, config: InspectConfig, reader: CacheReader, job: Job) -> None:
    """Prints how gradients and distributions from the cache differ from those of the teacher's full output.

    Raises:
        InputError: The cache contains no sample of the data.
    """
    model, task = job.model, TASKS[job.task](())
    checkpoint = open_checkpoint(config.student, "student") if config.student else None
    student = halve_layers(model) if checkpoint is None else task.load_checkpoint(checkpoint.folder)
    rows = np.flatnonzero(reader.contains(job.samples.keys))
    if not len(rows):
        raise InputError(f"cache {config.cache!r}: expected samples of the data, found none: nothing can be compared")
    lengths = [int(job.samples.lengths[i]) for i in rows]
    batches = spread_batches(lengths, reader.store.batch_tokens, config.fidelity)
    fidelity = measure_fidelity(
        reader,
        OnlineTeacher(model),
        student,
        job.samples,
        [[int(rows[i]) for i in batch] for batch in batches],
        lambda logits, targets: distribution_loss(logits, targets, targets.get("temperature", 1.0)),
        task.output_rows,
    )
    lines = [
        ("KL(cached, dense), one draw" if fidelity.sampled else "KL(dense, cached)", f"{fidelity.kl:.5f} nats"),
        (
            "angle of the student's gradients",
            f"{fidelity.gradient_angle:.2f} degrees, mean of {fidelity.batches} batches",
        ),
        ("expected calibration error", f"{fidelity.calibration_error:.4f} against the dense teacher"),
        ("measured on", f"{fidelity.positions:,} positions"),
    ]
    console.table("Fidelity", ("measure", "value"), lines)
