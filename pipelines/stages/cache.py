"""The cache stage: the teacher's signals that the loss terms use, for every training and unlabelled text."""

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

from transformers import AutoConfig

from distill.data.config import DataConfig
from distill.losses.config import LayerSizes, LossConfig, match_layers
from distill.models.layer_sizes import read_layer_sizes
from distill.parallel.mesh import build_mesh
from distill.tasks.language import Chatting, Language, MaskedLM
from distill.tasks.question_answering import QuestionAnswering
from distill.tasks.task import Task
from pipelines.runs.placement import detect_device_type
from pipelines.runs.stage import Artefact, Run
from pipelines.settings.cache_config import KeepConfig, WriteConfig
from pipelines.settings.distill_config import DistillConfig
from pipelines.settings.plan import Plan
from pipelines.settings.task_settings import STORED_FORM
from pipelines.stages.cache_writing import write_together
from pipelines.stages.cached_signals import open_teacher, prepare_job, record
from pipelines.stages.data import read_task
from pipelines.stages.teacher import MODEL

VERSION = 1  # of this stage's algorithm; bump it when the same inputs give a different result (docs/stages.md)
CACHE = "cache"


def cache_stage(run: Run, plan: Plan, data: Artefact, teacher: Artefact) -> Artefact:
    """Writes `cache/`, which `python -m pipelines.cache` can read, verify and rebuild like any other cache."""
    config, layout = plan.settings, plan.layouts.teacher
    own = AutoConfig.from_pretrained(teacher.folder / MODEL) if teacher.digest else None
    task = read_task(data) if data.digest else None
    keep = kept_of(config, type(task), read_layer_sizes(own), plan.student_sizes) if own and task else KeepConfig()
    settings = {"signals": keep.signals, "layers": keep.layers, "max_length": config.data.max_length}
    settings |= {"vectors": keep.vectors} if keep.vectors else {}
    asked = {name: getattr(keep, name) for name in STORED_FORM if getattr(keep, name) != getattr(KeepConfig(), name)}
    settings |= {"keep": asdict(keep)} if isinstance(task, Language) else asked

    def work(folder: Path) -> dict[str, Any]:
        unlabelled = data.folder / "unlabelled.parquet"
        texts = DataConfig(
            path=str(data.folder),
            text=None if isinstance(task, Chatting) else "text",
            text_pair="text_pair" if isinstance(task, QuestionAnswering) else None,
            unlabelled=str(unlabelled) if data.metrics["unlabelled"] else None,
            max_length=config.data.max_length,
            packing=cast(Any, task.packing) if isinstance(task, Language) else "auto",
        )
        assert task is not None
        cache, name = folder / CACHE, cast(Any, task.name)
        masking = task.masking if isinstance(task, MaskedLM) else config.masking
        wanted = WriteConfig(
            str(cache), str(teacher.folder / MODEL), name, texts, keep, masking, config.chat,
            device=detect_device_type(), seed=run.seed,
        )  # fmt: skip
        mesh = build_mesh(layout, detect_device_type()) if layout.sharded else None
        job = prepare_job(open_teacher(wanted), layout, mesh, run.world)
        made_from = from_inside(record(wanted), run.output, folder)
        written = write_together(
            run.console, run.world, cache, job.identity, job.samples, job.teacher, mesh, made_from=made_from
        )
        size = sum(file.stat().st_size for file in cache.rglob("*") if file.is_file())
        return {"samples": written.samples, "bytes": size, "shards_found": written.reused}

    return run.stage("cache", settings, {"data": data, "teacher": teacher}, work, version=VERSION, together=True)


def kept_of(config: DistillConfig, task: type[Task], teacher: LayerSizes, student: LayerSizes) -> KeepConfig:
    """Returns the signals that a run's cache stores."""
    keep = kept_for(config.loss, teacher, student, pruned=config.budget.requested)
    if issubclass(task, Language):
        return kept_words(config, keep, task.kept)
    return replace(keep, **{name: getattr(config.keep, name) for name in STORED_FORM})


def kept_for(loss: LossConfig, teacher: LayerSizes, student: LayerSizes, *, pruned: bool = False) -> KeepConfig:
    """Returns logits and the layers' signals that the loss terms use; for the map `dynamic` all hidden states.

    A `pruned` student may end with fewer layers, which a uniform map pairs with other layers of the teacher.
    """
    depths = range(1, student.layers + 1) if pruned and loss.layer_map == "uniform" else (student.layers,)
    read = [match_layers(loss, student._replace(layers=depth), teacher) for depth in depths]
    hidden, vectors = (sorted({layer for each in read for layer in getattr(each, name)}) for name in LAYERS)
    return KeepConfig(
        signals=",".join(loss.teacher_outputs),
        layers=",".join(map(str, hidden)) or "last",
        vectors=",".join(map(str, vectors)),
    )


def kept_words(config: DistillConfig, keep: KeepConfig, usual: str) -> KeepConfig:
    """Returns the signals stored of a language model: logits in the configured form, softened as the loss requires."""
    form = usual if config.keep.signals == "auto" else config.keep.signals
    names = [form if name == "logits" else name for name in keep.signals.split(",")]
    soft = config.loss.resolved_temperature if form != "logits" else None
    return replace(config.keep, signals=",".join(names), temperature=soft, layers=keep.layers, vectors=keep.vectors)


LAYERS = ("hidden_layers", "attention_layers")


def from_inside(made_from: dict[str, Any], output: Path, folder: Path) -> dict[str, Any]:
    """Returns `made_from` with paths inside the output made relative to the cache's folder.

    The same run in another output folder then writes identical bytes.
    """
    inside = output.resolve()
    final = folder.resolve().with_name(folder.name.removesuffix(".partial")) / CACHE

    def told(path: str | None) -> str | None:
        return os.path.relpath(path, final) if path and Path(path).is_relative_to(inside) else path

    data = made_from["data"]
    data |= {name: told(data[name]) for name in ("path", "unlabelled")}
    return made_from | {"teacher": told(made_from["teacher"]), "data": data}
