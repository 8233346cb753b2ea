"""The stages after training: exports, measured speeds, students that are cut again for being slow, and evaluation."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import count
from typing import TypeGuard

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
from pipelines.stages.deliver.exported_targets import (
    find_budget_target,
    find_scored_target,
    list_student_targets,
    list_teacher_targets,
)
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
    prune_nested,
    prune_to,
    quantize_students,
)

_PARITY_BLOCKS = 8  # most blocks on which a language model's exports are compared; each has tens of MB of logits
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
    targets = list_measured_targets(plan.settings)
    targets = [each for each in targets if delivery.find_students(each)]  # a frontier lacks what no shape reaches
    # The students of a nested family share their weights, and are cut again together.
    for group in [targets] if plan.settings.prune.nested else [[each] for each in targets]:
        delivery.reach_speeds(group)
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
        self.export("-teacher", self.stages["teacher"], list_teacher_targets(self.config))
        for each in self.students:
            self.export_student(each)

    def export_student(self, student: TrainedStudent) -> None:
        """Exports a student."""
        self.export(student.suffix, student.stage, list_student_targets(self.config, student.scheme))

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
            parity=min(parity, _PARITY_BLOCKS) if isinstance(self.task, Language) else parity,
            max_length=self.config.data.max_length,
            targets=targets,
            reduce_range=reduces_range_of_dynamic_int8(self.config),
        )

    def fit_biases(self, name: str, model: Artefact) -> Artefact:
        """Returns the stage of a model with fitted biases of its classes."""
        stage = class_biases_stage(self.run, name, model, self.stages["data"], self.config.data.max_length)
        self.stages[name] = stage
        return stage

    def reach_speeds(self, targets: Sequence[SpeedTarget]) -> None:
        """Measures the students of targets, and cuts them again while one is too slow and that is allowed.

        Every attempt is a set of stages of its own: the students that were too slow are kept in their folders.
        """
        retries: Counter[str] = Counter()  # by target
        reason = ""
        for attempts in count():
            measured = {each.name: self.measure(each) for each in targets}
            factors = {
                name: factor
                for name, stage in measured.items()
                if is_measured(stage) and (factor := find_correction(stage.metrics)) is not None
            }
            targets = [replace(each, correction=each.correction * factors.get(each.name, 1.0)) for each in targets]
            if factors:
                reason = self.replace_students(targets, factors, attempts)
            if not factors or reason:
                break
            retries.update(list(factors))
        for each in targets:
            self.record_speed(each, measured[each.name], retries[each.name], reason if each.name in factors else "")

    def record_speed(self, target: SpeedTarget, stage: Artefact | None, retries: int, reason: str) -> None:
        """Notes the speed of a target's student for the evaluation, and why it isn't cut again if it is too slow."""
        if stage is None:
            return
        if is_measured(stage) and not reason and is_slow(stage.metrics["share"]["value"]):
            reason = WIDE
        wanted = find_budget_target(self.config.budget)
        self.speeds[self.find_scored(target).name] = RequestedSpeed(wanted, stage, retries, reason)

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

    def replace_students(self, targets: Sequence[SpeedTarget], factors: Mapping[str, float], attempts: int) -> str:
        """Replaces the students of targets by ones that are pruned again, trained and exported.

        Pruned models are cut from the same start as before, not from the trained ones, so that the students are those
        that higher targets would have given.

        Args:
            targets: A target, or all of a nested family, corrected where its student is too slow.
            factors: Target -> how much faster its student has to be, of those that are too slow.
            attempts: How often that was done before.

        Returns:
            Why they aren't replaced; empty if they are.
        """
        limit = self.config.budget.retries
        if attempts == limit:
            return f"budget.retries allows {limit}"
        for name, factor in factors.items():
            self.run.console.say(
                f"  speed-{name}: too slow: pruned again, to {factor:.2f} times its speed, and trained again"
            )
        stages = self.prune_again(targets)
        if not stages:
            return "no faster shape was found"
        number = len(list_targets(self.config.budget))
        students = [collect_student(stages, each, number) for each in targets]
        self.stages |= stages
        fresh, self.stages = quantize_students(
            self.run, self.config, self.stages, students, self.stages, self.precision
        )
        by_name = {each.name: each for each in fresh}
        self.students = [by_name.get(each.name, each) for each in self.students]
        for each in fresh:
            self.export_student(each)
        return ""

    def prune_again(self, targets: Sequence[SpeedTarget]) -> Stages:
        """Returns the stages of corrected targets by name; none if no faster shape is found."""
        pipeline = build_pruning_context(self.run, self.plan, self.stages, self.precision)
        previous = {each.name: self.stages[f"shape-{each.name}"] for each in targets}
        if self.config.prune.nested:
            return prune_nested(pipeline, targets, previous)
        (target,) = targets
        stages = prune_to(pipeline, target, previous[target.name])
        return stages if stages[f"shape-{target.name}"].metrics["faster"] else {}

    def evaluate(self) -> None:
        """Scores and times all models."""
        config, stages = self.config, self.stages
        teacher = stages["teacher"].name
        models = [EvaluatedModel("teacher", teacher, stages[TEACHER_EXPORT], find_scored_target(config))]
        for each in self.students:
            export, scored = stages[f"export{each.suffix}"], find_scored_target(config, each.scheme)
            models.append(EvaluatedModel(each.name, each.stage.name, export, scored, self.speeds.get(each.name)))
        seconds = remaining_seconds(self.run)
        stages["evaluate"] = evaluate_stage(
            self.run, models, self.splits, stages["data"], config.measure, config.data.max_length, self.task, seconds
        )


def is_measured(stage: Artefact | None) -> TypeGuard[Artefact]:
    """Returns whether a speed is known: there is no stage without a proven file, and no measurement in a dry run."""
    return stage is not None and stage.digest is not None
