"""The cache stage: the teacher's signals that the loss terms use, for every training and unlabelled text."""

import os
from dataclasses import asdict, replace
from pathlib import Path

from distill.data.config import DataConfig
from distill.losses.config import LayerSizes, LossConfig, match_layers
from distill.models.layer_sizes import read_layer_sizes
from distill.parallel.mesh import build_mesh
from distill.tasks.language import ChatTask, Language, MaskedLM
from distill.tasks.names import default_signal
from distill.tasks.question_answering import QuestionAnswering
from distill.tasks.task import Task
from pipelines.runs.files import count_bytes
from pipelines.runs.manifest import JsonObject
from pipelines.runs.placement import detect_device_type
from pipelines.runs.stage import Artefact, Run
from pipelines.settings.commands.cache import KeepConfig, WriteConfig
from pipelines.settings.commands.distill import DistillConfig
from pipelines.settings.plan import RunPlan
from pipelines.settings.task_settings import STORED_FORM
from pipelines.stages.cache.job import open_teacher, prepare_job
from pipelines.stages.cache.record import record_settings
from pipelines.stages.cache.signals import name_cached_task
from pipelines.stages.cache.writing import write_together
from pipelines.stages.prepare.data import read_task
from pipelines.stages.prepare.teacher import MODEL, open_stage_checkpoint

VERSION = 1  # of this stage's algorithm; bump it when the same inputs give a different result (docs/stages.md)
CACHE = "cache"


def cache_stage(run: Run, plan: RunPlan, data: Artefact, teacher: Artefact) -> Artefact:
    """Writes `cache/`, which `python -m pipelines.cache` can read, verify and rebuild like any other cache."""
    config, layout = plan.settings, plan.layouts.teacher
    task = read_task(data) if data.digest else None
    keep = KeepConfig()  # in a dry run whose teacher isn't built yet
    if teacher.digest and task is not None:
        teacher_sizes = read_layer_sizes(open_stage_checkpoint(teacher, "teacher").config)
        keep = choose_signals(config, type(task), teacher_sizes, plan.student_sizes)
    settings = {"signals": keep.signals, "layers": keep.layers, "max_length": config.data.max_length}
    settings |= {"vectors": keep.vectors} if keep.vectors else {}
    changed = {name: getattr(keep, name) for name in STORED_FORM if getattr(keep, name) != getattr(KeepConfig(), name)}
    settings |= {"keep": asdict(keep)} if isinstance(task, Language) else changed

    def work(folder: Path) -> JsonObject:
        assert task is not None
        wanted = write_settings(run, config, data, teacher, task, keep, folder / CACHE)
        mesh = build_mesh(layout, detect_device_type()) if layout.sharded else None
        job = prepare_job(open_teacher(wanted), layout, mesh, run.world)
        made_from = make_paths_relative(record_settings(wanted), run.output, folder)
        cache = folder / CACHE
        written = write_together(
            run.console, run.world, cache, job.identity, job.samples, job.teacher, mesh, made_from=made_from
        )
        return {"samples": written.samples, "bytes": count_bytes(cache), "shards_found": written.reused_shards}

    return run.stage("cache", settings, {"data": data, "teacher": teacher}, work, version=VERSION, together=True)


def write_settings(
    run: Run, config: DistillConfig, data: Artefact, teacher: Artefact, task: Task, keep: KeepConfig, cache: Path
) -> WriteConfig:
    """Returns the settings with which `python -m pipelines.cache write` would write the run's cache."""
    unlabelled = data.folder / "unlabelled.parquet"
    texts = DataConfig(
        path=str(data.folder),
        text=None if isinstance(task, ChatTask) else "text",
        text_pair="text_pair" if isinstance(task, QuestionAnswering) else None,
        unlabelled=str(unlabelled) if data.metrics["unlabelled"] else None,
        max_length=config.data.max_length,
        packing=task.packing if isinstance(task, Language) else "auto",
    )
    return WriteConfig(
        str(cache),
        str(teacher.folder / MODEL),
        name_cached_task(type(task)),
        texts,
        keep,
        task.masking if isinstance(task, MaskedLM) else config.masking,
        config.chat,
        accelerator=detect_device_type(),
        seed=run.seed,
    )


def choose_signals(config: DistillConfig, task: type[Task], teacher: LayerSizes, student: LayerSizes) -> KeepConfig:
    """Returns the signals that a run's cache stores."""
    keep = choose_loss_signals(config.loss, teacher, student, pruned=config.budget.requested)
    if issubclass(task, Language):
        return choose_language_signals(config, keep, default_signal(task.name))
    return replace(keep, **{name: getattr(config.keep, name) for name in STORED_FORM})


def choose_loss_signals(
    loss: LossConfig, teacher: LayerSizes, student: LayerSizes, *, pruned: bool = False
) -> KeepConfig:
    """Returns logits and the layers' signals that the loss terms use; for the map `dynamic` all hidden states.

    A `pruned` student may end with fewer layers, which a uniform map pairs with other layers of the teacher.
    """
    depths = range(1, student.layers + 1) if pruned and loss.layer_map == "uniform" else (student.layers,)
    read = [match_layers(loss, student._replace(layers=depth), teacher) for depth in depths]
    hidden, vectors = (
        sorted({layer for each in read for layer in getattr(each, name)})
        for name in ("hidden_layers", "attention_layers")
    )
    return KeepConfig(
        signals=",".join(loss.teacher_outputs),
        layers=",".join(map(str, hidden)) or "last",
        vectors=",".join(map(str, vectors)),
    )


def choose_language_signals(config: DistillConfig, keep: KeepConfig, default: str) -> KeepConfig:
    """Returns the signals stored of a language model: logits in the configured form, softened as the loss requires."""
    form = default if config.keep.signals == "auto" else config.keep.signals
    names = [form if name == "logits" else name for name in keep.signals.split(",")]
    temperature = config.loss.resolved_temperature if form != "logits" else None
    return replace(
        config.keep, signals=",".join(names), temperature=temperature, layers=keep.layers, vectors=keep.vectors
    )


def make_paths_relative(made_from: JsonObject, output: Path, folder: Path) -> JsonObject:
    """Returns `made_from` with paths inside the output made relative to the cache's folder.

    The same run in another output folder then writes identical bytes.
    """
    inside = output.resolve()
    final = folder.resolve().with_name(folder.name.removesuffix(".partial")) / CACHE

    def relative(path: str | None) -> str | None:
        return os.path.relpath(path, final) if path and Path(path).is_relative_to(inside) else path

    data = made_from["data"]
    data |= {name: relative(data[name]) for name in ("path", "unlabelled")}
    return made_from | {"teacher": relative(made_from["teacher"]), "data": data}
