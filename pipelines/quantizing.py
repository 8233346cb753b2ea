"""The quantize stage: a trained student made to compute in few bits, and trained so on the teacher's signals."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from compress.prune.checkpoint import load_pruned
from compress.quantize.prepare import convert, prepare
from compress.quantize.ranges import calibrate
from compress.quantize.schemes import scheme_of
from compress.quantize.store import save_rounding
from distill.data.batches import EvalBatches
from distill.data.encode import Encoded
from distill.data.module import TextDataModule
from distill.module import DistillationModule
from distill.tasks.text_classification import TextClassification
from distill.teacher.online import INPUTS
from pipelines.config import DistillConfig
from pipelines.data import read_data
from pipelines.placing import save_model
from pipelines.stage import Artefact, Run
from pipelines.student import Pruned, cached_signals, texts_module
from pipelines.teacher import MODEL, training_settings
from pipelines.trainer import fit
from pipelines.words import tokenizer_of


def quantize_stage(
    run: Run, config: DistillConfig, data: Artefact, cache: Artefact, student: Pruned, precision: str
) -> Artefact:
    """Writes `model/`: the student with weights on the scheme's grid, and beside them `quantization.safetensors`, the
    numbers that it is deployed with. Its score is that of the model that rounds.
    """
    config = replace(config, train=quantized_train(config))
    how = config.quantize
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
        seen = calibrate(
            model, calibration(texts, how.samples, run.seed), how.ranges, learned=how.learned, seed=run.seed
        )
        run.console.say(f"  quantize: {len(layers)} layers round as {how.scheme}, ranges from {seen} texts")
        before = score(model, texts.validation, texts.pad_id)
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


def quantized_train(config: DistillConfig) -> Any:
    how = config.quantize
    return replace(config.train, epochs=how.epochs, learning_rate=how.learning_rate)


def calibration(texts: TextDataModule, samples: int, seed: int) -> Iterator[dict[str, Tensor]]:
    """Training texts drawn by the seed, as the model reads them."""
    rows = np.random.default_rng(seed).permutation(len(texts.train))[:samples]
    for start in range(0, len(rows), 32):
        yield inputs_of(texts.train.collate(rows[start : start + 32], texts.pad_id))


def inputs_of(batch: Any) -> dict[str, Tensor]:
    return {name: batch[name] for name in INPUTS if name in batch}


@torch.no_grad()
def score(model: PreTrainedModel, split: Encoded, pad_id: int) -> float:
    """Share of a split's texts that get their class."""
    model.eval()
    right = 0
    for batch in EvalBatches(split, 32, pad_id):
        right += int((model(**inputs_of(batch)).logits.argmax(-1) == batch["labels"]).sum())
    return right / max(1, len(split))
