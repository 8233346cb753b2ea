"""The students of a run: the student that the settings describe, or one for each target speed of the budget."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pipelines.reports.pruning_summary import student_name
from pipelines.runs.stage import Artefact, Run
from pipelines.settings.distill_config import DistillConfig
from pipelines.settings.plan import Plan, Target, round_name, targets_of
from pipelines.settings.schemes import quantization_by, schemes_of
from pipelines.stages.distill import PrunedStart, student_stage
from pipelines.stages.gradual_prune import close_stage
from pipelines.stages.importance import scores_stage
from pipelines.stages.label_order import by_label_stage
from pipelines.stages.prune_inputs import costs_stage, start_stage
from pipelines.stages.prune_rounds import round_stage
from pipelines.stages.quantize import quantize_stage
from pipelines.stages.shape import Inputs, shape_stage

Stages = dict[str, Artefact]


@dataclass(frozen=True)
class Trained:
    """A trained student.

    Args:
        name: Name in reports and of its folder: `student`, or for several students for example `student-10x`.
        suffix: Suffix of its stages' names.
        made: The stage that trained it.
        shape: The stage that chose its shape, if it was pruned.
        scheme: The quantization scheme, if it was quantized.
    """

    name: str
    suffix: str
    made: Artefact
    shape: Artefact | None = None
    scheme: str = ""


@dataclass(frozen=True)
class PruningPipeline:
    """The inputs and settings shared by all students of a budget."""

    run: Run
    plan: Plan
    given: Inputs
    precision: str

    @property
    def config(self) -> DistillConfig:
        """The run's settings."""
        return self.plan.settings

    def with_epochs(self, epochs: int) -> "PruningPipeline":
        """Returns the pipeline with another number of training epochs."""
        settings = replace(self.config, train=replace(self.config.train, epochs=epochs))
        return replace(self, plan=replace(self.plan, settings=settings))

    def trained(self, pruned: PrunedStart, epochs: int) -> Artefact:
        """Trains a pruned student for `epochs` epochs."""
        plan, given = self.with_epochs(epochs).plan, self.given
        return student_stage(self.run, plan, given.data, given.teacher, given.cache, self.precision, pruned)


def train_students(run: Run, plan: Plan, made: Mapping[str, Artefact], precision: str) -> tuple[list[Trained], Stages]:
    """Returns all students of the run, the largest first, and the intermediate stages by name."""
    config = plan.settings
    data, teacher, cache = made["data"], made["teacher"], made.get("cache")
    if config.student.given:
        done = given_stage(run, plan, data, teacher)
        return quantize_students(run, config, made, [Trained("student", "", done)], {"student": done}, precision)
    if not config.budget.requested:
        done = student_stage(run, plan, data, teacher, cache, precision, general=made.get("general"))
        return quantize_students(run, config, made, [Trained("student", "", done)], {"distill": done}, precision)
    assert cache is not None
    start = start_stage(run, plan, data, teacher)
    stages = {"start": start, "costs": costs_stage(run, config, data, teacher, start)}
    stages["scores"] = scores_stage(run, config, data, cache, PrunedStart("start", start, None, start))
    given = Inputs(data, teacher, cache, start, start, stages["scores"], stages["costs"])
    pipeline = PruningPipeline(run, plan, given, precision)
    targets, students = targets_of(config.budget), []
    for target in targets:
        stages |= SCHEDULES[config.prune.schedule](pipeline, target)
        done, shape = stages[f"distill-{target.name}"], stages[f"shape-{target.name}"]
        students.append(Trained(student_name(target.name, len(targets)), f"-{target.name}", done, shape))
    return quantize_students(run, config, made, students, stages, precision)


def given_stage(run: Run, plan: Plan, data: Artefact, teacher: Artefact) -> Artefact:
    """Returns the stage of a student that is already trained."""
    return teacher if plan.student is None else by_label_stage(run, plan.student, data)


def quantize_students(
    run: Run,
    config: DistillConfig,
    made: Mapping[str, Artefact],
    students: list[Trained],
    stages: Stages,
    precision: str,
) -> tuple[list[Trained], Stages]:
    """Returns the students quantized with every scheme that a format needs, or unchanged if none was requested."""
    schemes = list(schemes_of(config))
    if not schemes:
        return students, stages
    found = []
    for each in students:
        for scheme in schemes:
            other = f"-{scheme}" if scheme != schemes[0] else ""
            name, suffix = f"{each.name}{other}", f"{each.suffix}{other}"
            how = quantization_by(config, scheme)
            start = PrunedStart(suffix, each.made, None, stages.get("start"))
            done = quantize_stage(run, config, made["data"], made["teacher"], made["cache"], start, precision, how)
            stages = stages | {f"quantize{suffix}": done}
            found.append(replace(each, name=name, suffix=suffix, made=done, scheme=scheme))
    return found, stages


def oneshot(pipeline: PruningPipeline, target: Target) -> Stages:
    """Prunes to the target at once, then trains."""
    given = pipeline.given
    shape = shape_stage(pipeline.run, pipeline.config, given, target)
    done = pipeline.trained(PrunedStart(target.name, given.start, shape, given.words), pipeline.config.train.epochs)
    return {f"shape-{target.name}": shape, f"distill-{target.name}": done}


def iterative(pipeline: PruningPipeline, target: Target) -> Stages:
    """Alternates partial pruning, training and new importance scores, until the last round meets the target."""
    stages: Stages = {}
    given = pipeline.given
    rounds = split_epochs(pipeline.config.train.epochs, pipeline.config.prune.rounds)
    for number, epochs in enumerate(rounds[:-1], 1):
        name = round_name(target, number)
        shape = round_stage(pipeline.run, pipeline.config, given, target, number)
        done = pipeline.trained(PrunedStart(name, given.start, shape, given.words), epochs)
        start = PrunedStart(name, done, None, given.words)
        scores = scores_stage(pipeline.run, pipeline.config, given.data, given.cache, start)
        stages |= {f"shape-{name}": shape, f"distill-{name}": done, f"scores-{name}": scores}
        given = replace(given, start=done, scores=scores)
    last = replace(pipeline.with_epochs(rounds[-1]), given=given)
    return stages | oneshot(last, target)


def gradual(pipeline: PruningPipeline, target: Target) -> Stages:
    """Closes units while training, down to the sizes of the shape stage, then removes them and trains on."""
    given, epochs = pipeline.given, pipeline.config.train.epochs
    shape = shape_stage(pipeline.run, pipeline.config, given, target)
    share = min(max(1, round(pipeline.config.prune.gradual * epochs)), epochs - 1)
    closed = close_stage(pipeline.run, pipeline.config, given, shape, target.name, pipeline.precision, share)
    done = pipeline.trained(PrunedStart(target.name, closed, None, given.words), epochs - share)
    return {f"shape-{target.name}": shape, f"close-{target.name}": closed, f"distill-{target.name}": done}


SCHEDULES = {"oneshot": oneshot, "iterative": iterative, "gradual": gradual}


def split_epochs(epochs: int, rounds: int) -> list[int]:
    """Returns the number of epochs of each round; the last rounds get the remainder."""
    return [epochs // rounds + (number >= rounds - epochs % rounds) for number in range(rounds)]
