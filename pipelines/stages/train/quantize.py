"""The quantize stage: quantizes a trained student and, with qat, trains it on the teacher's signals."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import lightning
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.export.common.fold import fold_norms
from compress.quantize.config import QuantizeConfig
from compress.quantize.gptq import apply_gptq
from compress.quantize.model import quantize_model
from compress.quantize.prepare import convert_quantized, learn_scales
from compress.quantize.sensitivity import measure_sensitivities, widen_most_sensitive
from compress.quantize.store import save_quantization
from distill.checkpoint.custom_models import load_model_folder
from distill.data.batches.data_module import TextDataModule
from distill.data.batches.encode import Batch
from distill.models.inputs import build_inputs
from distill.models.layer_sizes import read_layer_sizes
from distill.tasks.task import Task
from distill.train.module import DistillationModule
from pipelines.runs.manifest import JsonObject
from pipelines.runs.placement import save_model
from pipelines.runs.stage import Artefact, Run
from pipelines.runs.trainer import fit_module
from pipelines.runs.trainer_state import Metrics
from pipelines.runs.training_job import TrainingJob
from pipelines.settings.commands.distill import DistillConfig
from pipelines.stages.prepare.data import read_data, read_task
from pipelines.stages.prepare.scoring import SplitOutputs, TeacherComparison, compute_outputs
from pipelines.stages.prepare.teacher import MODEL, open_stage_checkpoint, training_settings
from pipelines.stages.prepare.tokens import SplitEncoder
from pipelines.stages.prepare.vocabulary import load_student_tokenizer
from pipelines.stages.train.sparsity import SparsityCallback
from pipelines.stages.train.student_start import StudentStart
from pipelines.stages.train.training_inputs import build_training_texts, draw_batches, open_cached_signals

VERSION = 4  # of this stage's algorithm; bump it when the same inputs give a different result (docs/stages.md)


class Validation:
    """Scores a model on the validation split and compares it with its own float outputs."""

    def __init__(self, model: PreTrainedModel, texts: TextDataModule, task: Task):
        self.model, self.texts, self.task = model, texts, task
        outputs = self.compute_outputs()
        self.float_score = outputs.score
        self.comparison = TeacherComparison(task, texts.validation, texts.pad_id, outputs)

    def compute_outputs(self) -> SplitOutputs:
        """Returns the model's outputs on the validation split."""
        return compute_outputs(self.model, self.texts.validation, self.texts.pad_id, self.task)

    def score(self) -> float:
        """Returns the model's validation score."""
        return self.compute_outputs().score

    def divergence(self) -> float:
        """Returns the distance of the model's outputs from its float outputs, see `TeacherComparison.divergence`."""
        return self.comparison.divergence(self.model)

    def widen_sensitive_layers(self, run: Run, settings: QuantizeConfig, batch: Batch) -> None:
        """Gives the most sensitive layers more bits until the minimum score is reached."""
        reduce_range, target = settings.reduce_range is True, settings.min_score_share * self.float_score
        ranked = measure_sensitivities(self.model, self.divergence, batch, reduce_range=reduce_range)
        names, _ = widen_most_sensitive(self.model, ranked, self.score, target, reduce_range=reduce_range)
        run.console.say(f"  quantize: {len(names)} layers have more bits: {', '.join(names) or 'none'}")


def quantize_stage(
    run: Run,
    config: DistillConfig,
    data: Artefact,
    teacher: Artefact,
    cache: Artefact,
    student: StudentStart,
    precision: str,
    settings: QuantizeConfig,
) -> Artefact:
    """Writes `model/`: the student with weights on the scheme's grid, and its quantization parameters for deployment.

    The parameters are stored in `quantization.safetensors`. The score is that of the quantized model.
    """
    config = replace(config, train=replace(config.train, epochs=settings.epochs, learning_rate=settings.learning_rate))
    quantization = QuantizedTraining(run, config, data, teacher, cache, student, precision, settings)
    return run.stage(
        f"quantize{student.name}",
        quantization.settings(),
        quantization.inputs(),
        quantization.work,
        version=VERSION,
        together=True,
    )


@dataclass(frozen=True)
class QuantizedTraining:
    """The inputs, the key and the work of the stage; see `quantize_stage`."""

    run: Run
    config: DistillConfig
    data: Artefact
    teacher: Artefact
    cache: Artefact
    student: StudentStart
    precision: str
    quantization: QuantizeConfig

    def inputs(self) -> dict[str, Artefact]:
        """Returns the stages that the quantized student depends on."""
        return {"data": self.data, "cache": self.cache} | self.student.inputs()

    def settings(self) -> JsonObject:
        """Returns the settings that the quantized student depends on."""
        config = self.config
        # Of the processor only its effect on `reduce_range` matters.
        quantization = {name: value for name, value in asdict(self.quantization).items() if name != "processor"}
        settings = {
            "quantize": quantization,
            "loss": vars(config.loss.without_layer_terms),
            "train": training_settings(config, "train"),
            "precision": self.precision,
            "max_length": config.data.max_length,
        }
        return settings | ({"sparsity": vars(config.sparsity)} if config.sparsity.requested else {})

    def work(self, folder: Path) -> JsonObject:
        """Quantizes and trains the student, writes it to `folder`, and returns the metrics."""
        task, tokenizer = read_task(self.data), load_student_tokenizer(self.student.folder)
        task.configure_tokenizer(tokenizer, self.student.folder)
        model = fold_norms(load_model_folder(self.student.folder))
        texts = self.build_texts(tokenizer, task)
        batches = draw_batches(texts, self.quantization.samples, self.run.seed, task.eval_batch_size)
        drawn = [build_inputs(model, batch) for batch in batches]
        validation = Validation(model, texts, task)
        layers = self.calibrate(model, validation, drawn)
        score = validation.score()
        self.run.console.say(f"  quantize: validation {score:.4f}, in float {validation.float_score:.4f}")
        metrics: JsonObject = {"val/float": validation.float_score, "val/calibrated": score}
        if self.quantization.method == "qat":
            metrics |= self.train(model, texts, task, folder) | {"wait_share": texts.wait_share}
        quantization = convert_quantized(model)
        save_model(model, tokenizer, folder / MODEL, self.run.world)
        save_quantization(quantization, folder / MODEL)
        return {"val/score": score} | metrics | {"params": model.num_parameters(), "layers": layers}

    def build_texts(self, tokenizer: PreTrainedTokenizerBase, task: Task) -> TextDataModule:
        """Returns the texts with the teacher's cached signals."""
        signals = open_cached_signals(self.cache, self.student)
        return build_training_texts(
            self.run, self.config, read_data(self.data), tokenizer, signals, SplitEncoder(self.run, task)
        )

    def calibrate(self, model: PreTrainedModel, validation: Validation, drawn: Sequence[dict[str, Tensor]]) -> int:
        """Makes the model round, with ranges from the drawn texts, and returns the number of layers that do."""
        settings = self.quantization
        layers = quantize_model(model, settings, drawn, seed=self.run.seed)
        texts = sum(len(batch["input_ids"]) for batch in drawn)
        bits = (
            ", with 7-bit weights: products of larger ones would saturate on the target"
            if settings.reduce_range
            else ""
        )
        self.run.console.say(
            f"  quantize: {len(layers)} layers round as {settings.scheme}, ranges from {texts} texts{bits}"
        )
        if settings.min_score_share:
            validation.widen_sensitive_layers(self.run, settings, drawn[0])
        if settings.rounding == "gptq":
            apply_gptq(model, drawn)
        return len(layers)

    def train(self, model: PreTrainedModel, texts: TextDataModule, task: Task, folder: Path) -> Metrics:
        """Trains the quantized model on the cached signals and returns its validation metrics."""
        run, config, loss = self.run, self.config, self.config.loss.without_layer_terms
        if self.quantization.learned_scales:
            learn_scales(model)
        lightning.seed_everything(run.seed, verbose=False)
        module = DistillationModule(
            model,
            loss=loss,
            train=config.train,
            metric=task.scorer(),
            output_rows=task.output_rows,
            teacher_sizes=read_layer_sizes(open_stage_checkpoint(self.teacher, "teacher").config),
        )
        job = TrainingJob.from_run(
            run,
            label="student: quantization-aware training",
            train=config.train,
            machine=config.machine,
            precision=self.precision,
        )
        callbacks = [SparsityCallback(config.sparsity, is_sparse=True)] if config.sparsity.requested else []
        return fit_module(module, texts, folder, job, callbacks)
