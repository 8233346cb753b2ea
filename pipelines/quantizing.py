"""The quantize stage: a trained student made to compute in few bits, and trained so on the teacher's signals."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import lightning
import torch

from compress.prune.checkpoint import load_pruned
from compress.quantize.prepare import convert, prepare
from compress.quantize.ranges import calibrate
from compress.quantize.schemes import scheme_of
from compress.quantize.store import save_rounding
from distill.module import DistillationModule
from distill.tasks.text_classification import TextClassification
from distill.teacher.online import inputs_of
from pipelines.config import DistillConfig
from pipelines.data import read_data
from pipelines.logits import accuracy, split_logits
from pipelines.placing import save_model
from pipelines.stage import Artefact, Run
from pipelines.student import Pruned, cached_signals, drawn_batches, texts_module
from pipelines.teacher import MODEL, training_settings
from pipelines.trainer import fit
from pipelines.words import tokenizer_of


def quantize_stage(
    run: Run, config: DistillConfig, data: Artefact, cache: Artefact, student: Pruned, precision: str
) -> Artefact:
    """Writes `model/`: the student with weights on the scheme's grid, and beside them `quantization.safetensors`, the
    numbers that it is deployed with. Its score is that of the model that rounds.
    """
    how = config.quantize
    config = replace(config, train=replace(config.train, epochs=how.epochs, learning_rate=how.learning_rate))
    settings = {
        "quantize": asdict(how),
        "loss": vars(config.loss),
        "train": training_settings(config, "train"),
        "precision": precision,
        "max_length": config.data.max_length,
    }

    def work(folder: Path) -> dict[str, Any]:
        splits, tokenizer = read_data(data), tokenizer_of(student.start)
        model = load_pruned(student.start)
        texts = texts_module(run, config, splits, tokenizer, cached_signals(cache, student))
        layers = prepare(model, scheme_of(how.scheme), keep=how.kept)
        drawn = (inputs_of(batch) for batch in drawn_batches(texts, how.samples, run.seed))
        seen = calibrate(model, drawn, how.ranges, learned=how.learned, seed=run.seed)
        run.console.say(f"  quantize: {len(layers)} layers round as {how.scheme}, ranges from {seen} texts")
        logits = split_logits(model, texts.validation, texts.pad_id)
        before = accuracy(logits, torch.as_tensor(texts.validation.labels))
        metrics: dict[str, Any] = {"val/calibrated": before}
        if how.method == "qat":
            lightning.seed_everything(run.seed, verbose=False)
            metrics |= fit(
                DistillationModule(
                    model, loss=config.loss, train=config.train, metric=TextClassification(splits.labels).metric()
                ),
                texts,
                folder,
                label="student: training in few bits",
                train=config.train,
                machine=config.machine,
                precision=precision,
                seed=run.seed,
                console=run.console,
                world=run.world,
                wandb_folder=run.output / "wandb",
            )
        rounding = convert(model)
        save_model(model, tokenizer, folder / MODEL)
        save_rounding(rounding, folder / MODEL)
        return {"val/score": before} | metrics | {"params": model.num_parameters(), "layers": len(layers)}

    inputs = {"data": data, "cache": cache} | student.inputs()
    return run.stage(f"quantize{student.name}", settings, inputs, work, together=True)
