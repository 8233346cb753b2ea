"""The stages after training: exports, measured speeds, students that are cut again for being slow, and evaluation."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from compress.export.common.targets import ExportTarget
from distill.data.splits.examples import Splits
from distill.tasks.language import Language
from distill.tasks.task import Task
from pipelines.runs.stage import Artefact, Run
from pipelines.settings.commands.distill import DistillConfig
from pipelines.settings.plan import RunPlan, SpeedTarget, delivery_stages, list_measured_targets, list_targets
from pipelines.settings.schemes import measured_scheme, reduces_range_of_dynamic_int8
from pipelines.stages.deliver.class_biases import class_biases_stage
from pipelines.stages.deliver.evaluate import evaluate_stage
from pipelines.stages.deliver.evaluated_model import EvaluatedModel, RequestedSpeed
from pipelines.stages.deliver.export import export_stage
from pipelines.stages.deliver.exported_targets import forms_of_teacher, scored_target, student_targets, target_for
from pipelines.stages.deliver.speed import find_correction, is_slow, speed_stage
from pipelines.stages.deliver.timing import remaining_seconds
from pipelines.stages.prepare.compared_texts import as_plain_texts
from pipelines.stages.prepare.data import read_data, read_task
from pipelines.stages.prepare.teacher import MODEL
from pipelines.stages.students import (
    Stages,
    TrainedStudent,
    build_pruning_context,
    collect_student,
    prune_to,
    quantize_students,
)

_BLOCKS = 8  # maximum number of blocks for comparing a language model's exports; each has tens of megabytes of logits
TEACHER_EXPORT = "export-teacher"
WIDE = "the interval is too wide to tell whether it is too slow"  # why a student isn't cut again


def deliver_students(
    run: Run, plan: RunPlan, stages: Mapping[str, Artefact], students: Sequence[TrainedStudent], precision: str
) -> tuple[list[TrainedStudent], Stages]:
    """Returns the students as delivered, and the stages that exported, measured and, if need be, cut them again."""
    if any(each.stage.digest is None for each in students):  # in a dry run
        for name in (*delivery_stages(plan.settings), "evaluate", "report"):
            run.plan_stage(name)
        return list(students), {}
    delivery = Delivery(run, plan, precision, dict(stages), list(students))
    delivery.export_all()
    for target in list_measured_targets(plan.settings):
        if delivery.find_students(target):  # a frontier lacks those that no shape reaches
            delivery.reach_speed(target)
    delivery.evaluate()
    return delivery.students, delivery.stages


class Delivery:
    """Exports and measures students, and has them cut again if they are too slow.

    Args:
        run: The run.
        plan: Its plan.
        precision: Precision of training.
        stages: All stages by name; a student that is cut again replaces its stages.
        students: The trained students.
    """

    def __init__(self, run: Run, plan: RunPlan, precision: str, stages: Stages, students: list[TrainedStudent]):
        self.run, self.plan, self.precision = run, plan, precision
        self.stages, self.students = stages, students
        self.speeds: dict[str, RequestedSpeed] = {}  # by the student's name

    @property
    def config(self) -> DistillConfig:
        """The run's settings."""
        return self.plan.settings

    @cached_property
    def splits(self) -> Splits:
        """The data's splits."""
        return read_data(self.stages["data"])

    @cached_property
    def task(self) -> Task:
        """The task, with its labels."""
        return read_task(self.stages["data"])

    def export_all(self) -> None:
        """Exports the teacher and all students."""
        self.export("-teacher", self.stages["teacher"], forms_of_teacher(self.config))
        for each in self.students:
            self.export_student(each)

    def export_student(self, student: TrainedStudent) -> None:
        """Exports a student."""
        self.export(student.suffix, student.stage, student_targets(self.config, student.scheme))

    def export(self, suffix: str, model: Artefact, targets: Sequence[ExportTarget]) -> None:
        """Exports a model to its targets, if requested with fitted biases of its classes."""
        if self.config.fit_class_biases:
            model = self.fit_biases(f"biases{suffix}", model)
        parity = self.config.measure.parity
        self.stages[f"export{suffix}"] = export_stage(
            self.run,
            f"export{suffix}",
            model,
            model.folder / MODEL,
            as_plain_texts(self.splits.test),
            parity=min(parity, _BLOCKS) if isinstance(self.task, Language) else parity,
            max_length=self.config.data.max_length,
            targets=targets,
            reduce_range=reduces_range_of_dynamic_int8(self.config),
        )

    def fit_biases(self, name: str, model: Artefact) -> Artefact:
        """Returns the stage of a model with fitted biases of its classes."""
        stage = class_biases_stage(self.run, name, model, self.stages["data"], self.config.data.max_length)
        self.stages[name] = stage
        return stage

    def reach_speed(self, target: SpeedTarget) -> None:
        """Measures the student of a target, and cuts it again while it is too slow and that is allowed.

        Every attempt is a set of stages of its own: the students that were too slow are kept in their folders.
        """
        retries = 0
        while (stage := self.measure(target)) is not None:
            measured = stage.metrics if stage.digest is not None else None  # unmeasured in a dry run
            factor = find_correction(measured) if measured else None
            reason = WIDE if measured and factor is None and is_slow(measured["share"]["value"]) else ""
            if factor is not None:
                target = replace(target, correction=target.correction * factor)
                reason = self.prune_further(target, factor, retries)
            if factor is None or reason:
                wanted = target_for(self.config.budget)
                self.speeds[self.find_scored(target).name] = RequestedSpeed(wanted, stage, retries, reason)
                return
            retries += 1

    def measure(self, target: SpeedTarget) -> Artefact | None:
        """Returns the stage that measures the speed of a target's student; None if it has no proven file."""
        exports = {
            "teacher": self.stages[TEACHER_EXPORT],
            "student": self.stages[f"export{self.find_scored(target).suffix}"],
        }
        seconds = remaining_seconds(self.run) / (2 * len(list_measured_targets(self.config)))
        stage = speed_stage(self.run, self.config, target, self.stages["data"], exports, seconds)
        if stage is not None:
            self.stages[stage.name] = stage
        return stage

    def find_scored(self, target: SpeedTarget) -> TrainedStudent:
        """Returns the student of a target that is exported in the budget's runtime and precision."""
        scheme = measured_scheme(self.config)
        return next(each for each in self.find_students(target) if each.scheme == scheme)

    def find_students(self, target: SpeedTarget) -> list[TrainedStudent]:
        """Returns a target's student in all its precisions."""
        return [each for each in self.students if each.target is not None and each.target.name == target.name]

    def prune_further(self, target: SpeedTarget, factor: float, retries: int) -> str:
        """Replaces a target's student by one that is pruned further, trained and exported; returns why not if it isn't.

        The pruned model is cut from the same start as before, not from the trained one, so that the student is the one
        that a higher target would have given.
        """
        limit = self.config.budget.retries
        if self.config.prune.nested:
            return "students of a nested family aren't cut again: their weights are those of the others"
        if retries == limit:
            return f"budget.retries allows {limit}"
        self.run.console.say(
            f"  speed-{target.name}: too slow: pruned further, to {factor:.2f} times its speed, and trained again"
        )
        pipeline = build_pruning_context(self.run, self.plan, self.stages, self.precision)
        stages = prune_to(pipeline, target, previous=self.stages[f"shape-{target.name}"])
        if not stages[f"shape-{target.name}"].metrics["faster"]:
            return "no faster shape was found"
        student = collect_student(stages, target, len(list_targets(self.config.budget)))
        self.stages |= stages
        fresh, self.stages = quantize_students(
            self.run, self.config, self.stages, [student], self.stages, self.precision
        )
        by_name = {each.name: each for each in fresh}
        self.students = [by_name.get(each.name, each) for each in self.students]
        for each in fresh:
            self.export_student(each)
        return ""

    def evaluate(self) -> None:
        """Scores and times all models."""
        config, stages = self.config, self.stages
        teacher = stages["teacher"].name
        models = [EvaluatedModel("teacher", teacher, stages[TEACHER_EXPORT], scored_target(config))]
        for each in self.students:
            export, scored = stages[f"export{each.suffix}"], scored_target(config, each.scheme)
            models.append(EvaluatedModel(each.name, each.stage.name, export, scored, self.speeds.get(each.name)))
        seconds = remaining_seconds(self.run)
        stages["evaluate"] = evaluate_stage(
            self.run, models, self.splits, stages["data"], config.measure, config.data.max_length, self.task, seconds
        )
