"""What the search for a shape starts from: finished stages, and what is loaded from them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from distill.checkpoint.custom_models import load_model_folder
from distill.data.batches.data_module import TextDataModule
from distill.data.batches.packing import find_padding_id
from distill.data.splits.examples import Splits
from distill.slicing import Axis
from distill.tasks.task import Task
from pipelines.reports.pruning_summary import LengthCosts, read_costs
from pipelines.runs.stage import Artefact, Run
from pipelines.runs.strategies.by_layout import choose_device
from pipelines.settings.commands.distill import DistillConfig
from pipelines.stages.cache.writing import load_teacher
from pipelines.stages.prepare.data import read_data, read_task
from pipelines.stages.prepare.scoring import SplitOutputs, compute_outputs
from pipelines.stages.prepare.teacher import MODEL
from pipelines.stages.prepare.vocabulary import load_student_tokenizer
from pipelines.stages.prune.start import find_prunable_axes
from pipelines.stages.train.student_start import StudentStart
from pipelines.stages.train.training_inputs import build_training_texts


@dataclass(frozen=True)
class ShapeInputs:
    """The stages that a shape search takes as input."""

    data: Artefact
    teacher: Artefact
    cache: Artefact
    tokens: Artefact
    start: Artefact
    scores: Artefact
    costs: Artefact

    def begin(self, config: DistillConfig, name: str, shape: Artefact | None) -> StudentStart:
        """Returns the start of a student's training, with a shape that the search has chosen, or None before it has."""
        return StudentStart(name, self.start, shape, self.tokens, self.scores if config.prune.reconstruct else None)

    def by_name(self) -> dict[str, Artefact]:
        """Returns the stages by their names in stage keys."""
        return dict(vars(self))


class LoadedInputs:
    """The model to prune and its tokenizer; data and the teacher's outputs are loaded on first use."""

    def __init__(self, run: Run, config: DistillConfig, stages: ShapeInputs):
        self.run, self.config, self.stages = run, config, stages
        self.model: PreTrainedModel = load_model_folder(stages.start.folder / MODEL)
        self.tokenizer: PreTrainedTokenizerBase = load_student_tokenizer(stages.start.folder / MODEL)
        self.axes: Sequence[Axis] = find_prunable_axes(self.model, self.task)

    @cached_property
    def costs(self) -> list[LengthCosts]:
        """The fitted costs at each length of the budget."""
        return read_costs(self.stages.costs)

    @cached_property
    def splits(self) -> Splits:
        """The data's splits."""
        return read_data(self.stages.data)

    @cached_property
    def task(self) -> Task:
        """The task, with its labels."""
        return read_task(self.stages.data)

    @cached_property
    def training_texts(self) -> TextDataModule:
        """The texts that trials train on."""
        return build_training_texts(self.run, self.config, self.splits, self.tokenizer, task=self.task)

    @cached_property
    def teacher_outputs(self) -> SplitOutputs:
        """The teacher's outputs on the validation split."""
        source = self.stages.teacher.folder / MODEL
        model, tokenizer = load_teacher(source), load_student_tokenizer(source)
        model.to(choose_device(self.config.machine.accelerator))  # type: ignore[arg-type]
        rows = self.task.encode(tokenizer, self.splits.validation, self.config.data.max_length)
        return compute_outputs(
            model, rows, find_padding_id(tokenizer), self.task, self.config.loss.resolved_temperature
        )
