"""The quantize stage: quantizes a trained student and, with qat, trains it on the teacher's signals."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import lightning
import torch
from transformers import AutoConfig, PreTrainedModel

from compress.quantize.config import QuantizeConfig
from compress.quantize.gptq import apply_gptq
from compress.quantize.model import quantize_model
from compress.quantize.prepare import convert, learn_scales
from compress.quantize.sensitivity import measure_sensitivities, widen_most_sensitive
from compress.quantize.store import save_quantization
from distill.checkpoint.pruned import load_pruned
from distill.data.batches.data_module import TextDataModule
from distill.models.inputs import build_inputs
from distill.models.layer_sizes import read_layer_sizes
from distill.tasks.task import Task
from distill.train.module import DistillationModule
from pipelines.runs.placement import save_model
from pipelines.runs.stage import Artefact, Run
from pipelines.runs.trainer import fit_module
from pipelines.settings.distill_config import DistillConfig
from pipelines.stages.data import read_data, read_task
from pipelines.stages.distill import PrunedStart, cached_signals, drawn_batches, texts_module
from pipelines.stages.scoring import Judge, SplitOutputs, compute_outputs
from pipelines.stages.sparsity import SparsityCallback
from pipelines.stages.teacher import MODEL, training_settings
from pipelines.stages.vocabulary import tokenizer_of

VERSION = 1  # of this stage's algorithm; bump it when the same inputs give a different result (docs/stages.md)


class Validation:
    """Scores a model on the validation split and compares it with its own float outputs."""

    def __init__(self, model: PreTrainedModel, texts: TextDataModule, task: Task):
        self.model, self.texts, self.task = model, texts, task
        said = self.said()
        self.in_float = said.score
        self.judge = Judge(task, texts.validation, texts.pad_id, said)

    def said(self) -> SplitOutputs:
        return compute_outputs(self.model, self.texts.validation, self.texts.pad_id, self.task)

    def score(self) -> float:
        return self.said().score

    def divergence(self) -> float:
        return self.judge.divergence(self.model)

    def ease(self, run: Run, how: QuantizeConfig, batch: Mapping[str, torch.Tensor]) -> None:
        """Gives the most sensitive layers more bits until the minimum score is reached."""
        reduce_range, least = how.reduced is True, how.min_score * self.in_float
        ranked = measure_sensitivities(self.model, self.divergence, batch, reduce_range=reduce_range)
        names, _ = widen_most_sensitive(self.model, ranked, self.score, least, reduce_range=reduce_range)
        run.console.say(f"  quantize: {len(names)} layers have more bits: {', '.join(names) or 'none'}")


def quantize_stage(
    run: Run,
    config: DistillConfig,
    data: Artefact,
    teacher: Artefact,
    cache: Artefact,
    student: PrunedStart,
    precision: str,
    how: QuantizeConfig,
) -> Artefact:
    """Writes `model/`: the student with weights on the scheme's grid, and its rounding parameters for deployment.

    The parameters are stored in `quantization.safetensors`. The score is that of the model with rounding.
    """
    config = replace(config, train=replace(config.train, epochs=how.epochs, learning_rate=how.learning_rate))
    settings = {
        "quantize": {
            name: value for name, value in asdict(how).items() if name != "processor"
        },  # only how.reduced depends on it
        "loss": vars(config.loss.without_layer_terms),
        "train": training_settings(config, "train"),
        "precision": precision,
        "max_length": config.data.max_length,
    }
    settings |= {"sparsity": vars(config.sparsity)} if config.sparsity.requested else {}

    def work(folder: Path) -> dict[str, Any]:
        task, tokenizer = read_task(data), tokenizer_of(student.start)
        task.settle_tokenizer(tokenizer, student.start)
        model = load_pruned(student.start)
        texts = texts_module(run, config, read_data(data), tokenizer, cached_signals(cache, student), task)
        batches = drawn_batches(texts, how.samples, run.seed, task.at_once)
        drawn = [build_inputs(model, batch) for batch in batches]
        validation = Validation(model, texts, task)
        layers = quantize_model(model, how, drawn, seed=run.seed)
        seen = sum(len(batch["input_ids"]) for batch in drawn)
        bits = ", with weights of 7 bits: products of larger ones saturate where they will run" if how.reduced else ""
        run.console.say(f"  quantize: {len(layers)} layers round as {how.scheme}, ranges from {seen} texts{bits}")
        if how.min_score:
            validation.ease(run, how, drawn[0])
        if how.weights == "gptq":
            apply_gptq(model, drawn)
        before = validation.score()
        run.console.say(f"  quantize: validation {before:.4f}, in float {validation.in_float:.4f}")
        metrics: dict[str, Any] = {"val/float": validation.in_float, "val/calibrated": before}
        if how.method == "qat":
            if how.learned:
                learn_scales(model)
            lightning.seed_everything(run.seed, verbose=False)
            metrics |= fit_module(
                DistillationModule(
                    model,
                    loss=config.loss.without_layer_terms,
                    train=config.train,
                    metric=task.scorer(),
                    output_rows=task.answers,
                    teacher_sizes=read_layer_sizes(AutoConfig.from_pretrained(teacher.folder / MODEL)),
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
                callbacks=[SparsityCallback(config.sparsity, held=True)] if config.sparsity.requested else [],
            )
        rounding = convert(model)
        save_model(model, tokenizer, folder / MODEL)
        save_quantization(rounding, folder / MODEL)
        return {"val/score": before} | metrics | {"params": model.num_parameters(), "layers": len(layers)}

    inputs = {"data": data, "cache": cache} | student.inputs()
    return run.stage(f"quantize{student.name}", settings, inputs, work, version=VERSION, together=True)
