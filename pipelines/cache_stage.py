"""The cache stage: what the losses read of the teacher, for every training and unlabelled text."""

import os
from pathlib import Path
from typing import Any, Final

from transformers import AutoConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from distill.data.config import DataConfig
from distill.losses.config import LossConfig, layer_pairs
from distill.teacher.cache import Identity
from pipelines.cache_config import KeepConfig, WriteConfig
from pipelines.cache_task import make_signal, prepare, record
from pipelines.caching import identity_of, write_with_progress
from pipelines.config import DistillConfig
from pipelines.stage import Artefact, Run
from pipelines.teacher import MODEL

CACHE = "cache"
TASK: Final = "text-classification"


def cache_stage(run: Run, config: DistillConfig, data: Artefact, teacher: Artefact, student_layers: int) -> Artefact:
    """Writes `cache/`; `python -m pipelines.cache` reads, verifies and rebuilds it like any other."""
    own = AutoConfig.from_pretrained(teacher.folder / MODEL) if teacher.digest else None
    keep = kept_for(config.loss, own, student_layers) if own else KeepConfig()
    settings = {"signals": keep.signals, "layers": keep.layers, "max_length": config.data.max_length}

    def work(folder: Path) -> dict[str, Any]:
        unlabelled = data.folder / "unlabelled.parquet"
        texts = DataConfig(
            path=str(data.folder),
            text="text",
            unlabelled=str(unlabelled) if data.metrics["unlabelled"] else None,
            max_length=config.data.max_length,
        )
        cache = folder / CACHE
        wanted = WriteConfig(str(cache), str(teacher.folder / MODEL), TASK, texts, keep, device="cpu")
        job = prepare(wanted)
        made_from = from_inside(record(wanted), run.output, folder)
        written = write_with_progress(run.console, cache, job.identity, job.samples, job.teacher, made_from=made_from)
        size = sum(file.stat().st_size for file in cache.rglob("*") if file.is_file())
        return {"samples": written.samples, "bytes": size, "shards_found": written.reused}

    return run.stage("cache", settings, {"data": data, "teacher": teacher}, work)


def kept_for(loss: LossConfig, teacher: PretrainedConfig, student_layers: int) -> KeepConfig:
    """Logits, and the hidden states that the layer map names."""
    if not loss.hidden:
        return KeepConfig(signals="logits")
    pairs = layer_pairs(loss.layer_map, student_layers, teacher.num_hidden_layers)
    layers = ",".join(str(layer) for layer in sorted({layer for _, layer in pairs}))
    return KeepConfig(signals="logits,hidden" if loss.kl else "hidden", layers=layers)


def stage_identity(
    loss: LossConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, student_layers: int
) -> Identity:
    """What the stage's cache has to be made from."""
    keep = kept_for(loss, model.config, student_layers)
    signals = tuple(make_signal(name, TASK, keep, model.config, 0) for name in keep.signals.split(","))
    return identity_of(model, tokenizer, signals, TASK)


def from_inside(made_from: dict[str, Any], output: Path, folder: Path) -> dict[str, Any]:
    """Paths told from the cache's folder: the same run in another place gives the same bytes."""
    inside = output.resolve()
    final = folder.resolve().with_name(folder.name.removesuffix(".partial")) / CACHE

    def told(path: str | None) -> str | None:
        return os.path.relpath(path, final) if path and Path(path).is_relative_to(inside) else path

    data = made_from["data"]
    data |= {name: told(data[name]) for name in ("path", "unlabelled")}
    return made_from | {"teacher": told(made_from["teacher"]), "data": data}
