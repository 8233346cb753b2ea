"""What is to be trained, whatever the machines: two models, their task, and the sizes of the data."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from distill.checkpoint.auto_class import AutoClass
from distill.data.batches.encode import Batch
from distill.losses.config import LAYER_TERMS, LayerSizes
from distill.models.depth import set_depth
from distill.models.layer_sizes import read_layer_sizes
from distill.tasks.language import Language, MaskedLM
from distill.tasks.question_answering import QuestionAnswering
from distill.tasks.task import Task
from distill.train.config import TrainConfig
from pipelines.planner.batches import BatchShape, build_fake_batch, build_fake_signals
from pipelines.planner.trace import Query, Training
from pipelines.settings.commands.cache import KeepConfig
from pipelines.settings.commands.distill import DistillConfig
from pipelines.settings.layouts import count_parameters
from pipelines.stages.cache.stage import choose_signals
from pipelines.stages.dry_run import count_cached_bytes


@dataclass(frozen=True)
class Workload:
    """A distillation, but for its machines and layouts.

    Args:
        settings: Settings of the run.
        task: The task.
        teacher: The teacher's config, with the task's labels.
        student: The student's config, with the task's labels.
        rows: Number of training rows.
    """

    settings: DistillConfig
    task: type[Task]
    teacher: PretrainedConfig
    student: PretrainedConfig
    rows: int

    @property
    def length(self) -> int:
        """Tokens of a row."""
        return self.settings.data.max_length

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole training."""
        train = self.settings.train
        return train.epochs * -(-self.rows // (train.rows * train.accumulate))

    @property
    def share(self) -> float:
        """Share of the tokens at which a language model predicts."""
        return self.settings.masking.rate if issubclass(self.task, MaskedLM) else 1.0

    @property
    def auto(self) -> AutoClass:
        """The auto class that builds both models."""
        return self.task(()).auto

    @cached_property
    def teacher_sizes(self) -> LayerSizes:
        """Sizes of the teacher's layers."""
        return read_layer_sizes(self.teacher)

    @cached_property
    def teacher_parameters(self) -> int:
        """Number of the teacher's parameters."""
        return count_parameters(self.teacher, self.auto)

    @cached_property
    def student_parameters(self) -> int:
        """Number of the student's parameters."""
        return count_parameters(self.student, self.auto)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache, at most."""
        return round(self.rows * count_cached_bytes(self.settings, self.teacher, self.student, self.task))

    @property
    def predicts_tokens(self) -> bool:
        """Whether the models are language models, which may compute segments of a row's positions."""
        return issubclass(self.task, Language)

    @property
    def is_traced_whole(self) -> bool:
        """Whether the student can't be traced with fewer layers, for terms pair them with the teacher's."""
        return self.settings.loss.computes(*LAYER_TERMS)

    def choose_signals(self, *, online: bool) -> KeepConfig:
        """Returns the signals that the student reads, from a cache or from a teacher that computes them."""
        keep = choose_signals(self.settings, self.task, self.teacher_sizes, read_layer_sizes(self.student))
        outputs = ",".join(self.settings.loss.teacher_outputs)
        return replace(keep, signals=outputs) if online else keep

    def describe_training(
        self, rows: int, layers: int, train: TrainConfig, *, online: bool, segments: int = 1
    ) -> Training:
        """Returns the training of a student of this depth, in batches of segments of `rows` on each process."""
        shape = BatchShape(rows, self.length, self.share, segments)
        loss, teacher = self.settings.loss, self.teacher

        def draw() -> Batch:
            batch = build_fake_batch(self.task, shape, int(teacher.num_labels or 1))
            if not loss.needs_teacher:
                return batch
            signals = build_fake_signals(self.task, shape, self.choose_signals(online=online), teacher)
            return batch | {"signals": cast(Tensor, signals)}  # as in the batches of a data module

        return Training(
            self.build(self.student, layers), draw, loss, train, self.settings.machine.precision,
            self.task.output_rows, self.teacher_sizes, self.share,
        )  # fmt: skip

    def describe_query(self, rows: int, layers: int, segments: int = 1) -> Query:
        """Returns the query of a teacher of this depth for a batch of segments of `rows`."""
        shape = BatchShape(rows, self.length, self.share, segments)
        labels = int(self.teacher.num_labels or 1)
        outputs = self.settings.loss.teacher_outputs
        return Query(
            self.build(self.teacher, layers), lambda: build_fake_batch(self.task, shape, labels), outputs,
            self.settings.machine.precision, self.share,
        )  # fmt: skip

    def build(self, config: PretrainedConfig, layers: int) -> Callable[[], PreTrainedModel]:
        """Returns a function that builds a model of this many layers."""
        shallow = set_depth(config, layers)
        return lambda: self.auto.from_config(shallow)


def set_labels(config: PretrainedConfig, task: type[Task], labels: int) -> None:
    """Sets the number of labels in a model's config; for question answering they are two, start and end."""
    config.num_labels = 2 if issubclass(task, QuestionAnswering) else labels
