"""The students of a run: the student that the settings describe, or one for each target speed of the budget."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from transformers import AutoConfig

from distill.checkpoint.folder import checkpoint_folder
from distill.errors import InputError
from distill.tasks.choose import TASKS
from distill.tasks.logit_rows import OutputRows
from pipelines.reports.steps import name_of
from pipelines.runs.stage import Artefact, Run
from pipelines.settings.combinations import check_together
from pipelines.settings.distill_config import DistillConfig
from pipelines.settings.layouts import Layouts
from pipelines.settings.schemes import quantization_by, schemes_of
from pipelines.stages.distill import PrunedStart, student_stage
from pipelines.stages.gradual_prune import close_stage
from pipelines.stages.importance import scores_stage
from pipelines.stages.label_order import by_label_stage
from pipelines.stages.prune_inputs import costs_stage, start_stage
from pipelines.stages.prune_rounds import round_name, round_stage
from pipelines.stages.quantize import quantize_stage
from pipelines.stages.shape import Inputs, Target, shape_stage, targets_of

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
    config: DistillConfig
    given: Inputs
    precision: str
    layouts: Layouts

    def trained(self, pruned: PrunedStart, epochs: int) -> Artefact:
        """Trains a pruned student for `epochs` epochs."""
        config = replace(self.config, train=replace(self.config.train, epochs=epochs))
        given = self.given
        return student_stage(
            self.run, config, given.data, given.teacher, given.cache, self.precision, self.layouts, pruned
        )


def train_students(
    run: Run, config: DistillConfig, made: Mapping[str, Artefact], precision: str, layouts: Layouts
) -> tuple[list[Trained], Stages]:
    """Returns all students of the run, the largest first, and the intermediate stages by name."""
    data, teacher, cache = made["data"], made["teacher"], made.get("cache")
    if config.student.given:
        done = given_stage(run, config, data, teacher)
        return quantize_students(run, config, made, [Trained("student", "", done)], {"student": done}, precision)
    if not config.budget.asked:
        done = student_stage(run, config, data, teacher, cache, precision, layouts, general=made.get("general"))
        return quantize_students(run, config, made, [Trained("student", "", done)], {"distill": done}, precision)
    assert cache is not None
    start = start_stage(run, config, data, teacher)
    stages = {"start": start, "costs": costs_stage(run, config, data, teacher, start)}
    stages["scores"] = scores_stage(run, config, data, cache, PrunedStart("start", start, None, start))
    given = Inputs(data, teacher, cache, start, start, stages["scores"], stages["costs"])
    road = PruningPipeline(run, config, given, precision, layouts)
    targets, students = targets_of(config.budget), []
    for target in targets:
        stages |= SCHEDULES[config.prune.schedule](road, target)
        done, shape = stages[f"distill-{target.name}"], stages[f"shape-{target.name}"]
        students.append(Trained(name_of(target.name, len(targets)), f"-{target.name}", done, shape))
    return quantize_students(run, config, made, students, stages, precision)


def given_stage(run: Run, config: DistillConfig, data: Artefact, teacher: Artefact) -> Artefact:
    """Returns the stage of a student that is already trained."""
    if config.student.spec == "teacher":
        return teacher
    folder = checkpoint_folder(config.student.spec, "student")
    return by_label_stage(run, "student", folder, data)


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


def oneshot(road: PruningPipeline, target: Target) -> Stages:
    """Prunes to the target at once, then trains."""
    given = road.given
    shape = shape_stage(road.run, road.config, given, target)
    done = road.trained(PrunedStart(target.name, given.start, shape, given.words), road.config.train.epochs)
    return {f"shape-{target.name}": shape, f"distill-{target.name}": done}


def iterative(road: PruningPipeline, target: Target) -> Stages:
    """Alternates partial pruning, training and new importance scores, until the last round meets the target."""
    stages: Stages = {}
    given = road.given
    rounds = split_epochs(road.config.train.epochs, road.config.prune.rounds)
    for number, epochs in enumerate(rounds[:-1], 1):
        name = round_name(target, number)
        shape = round_stage(road.run, road.config, given, target, number)
        done = road.trained(PrunedStart(name, given.start, shape, given.words), epochs)
        start = PrunedStart(name, done, None, given.words)
        scores = scores_stage(road.run, road.config, given.data, given.cache, start)
        stages |= {f"shape-{name}": shape, f"distill-{name}": done, f"scores-{name}": scores}
        given = replace(given, start=done, scores=scores)
    last = replace(road.config, train=replace(road.config.train, epochs=rounds[-1]))
    return stages | oneshot(replace(road, config=last, given=given), target)


def gradual(road: PruningPipeline, target: Target) -> Stages:
    """Closes units while training, down to the sizes of the shape stage, then removes them and trains on."""
    given, epochs = road.given, road.config.train.epochs
    shape = shape_stage(road.run, road.config, given, target)
    share = min(max(1, round(road.config.prune.gradual * epochs)), epochs - 1)
    closed = close_stage(road.run, road.config, given, shape, target.name, road.precision, share)
    done = road.trained(PrunedStart(target.name, closed, None, given.words), epochs - share)
    return {f"shape-{target.name}": shape, f"close-{target.name}": closed, f"distill-{target.name}": done}


SCHEDULES = {"oneshot": oneshot, "iterative": iterative, "gradual": gradual}


def split_epochs(epochs: int, rounds: int) -> list[int]:
    """Returns the number of epochs of each round; the last rounds get the remainder."""
    return [epochs // rounds + (number >= rounds - epochs % rounds) for number in range(rounds)]


def check_schedule(config: DistillConfig, precision: str, layouts: Layouts) -> None:
    """Checks the settings that depend on precision and layouts.

    Raises:
        InputError: As in `check_together` and `check_stages`.
    """
    check_together(config, precision, layouts)
    check_stages(config, layouts)


def check_stages(config: DistillConfig, layouts: Layouts) -> None:
    """Checks that tasks trained in pipeline stages have a row per sample or position.

    Raises:
        InputError: A model of a task with other rows, which micro-batches can't tell apart, would be trained in
            pipeline stages.
    """
    if config.task not in TASKS or type(TASKS[config.task].answers) is OutputRows:
        return
    for whose, layout in (("student", layouts.student), ("teacher", layouts.tuned)):
        if layout.pp > 1 and (whose == "student" or is_tuned(config)):
            raise InputError(
                f"{whose}.layout {layout}: expected no pipeline stages for {config.task}, found {layout.pp}: a row of "
                "its answers is neither a sample nor a position, which is what a stage passes on; use fsdp or tp"
            )


def is_tuned(config: DistillConfig) -> bool:
    """Returns whether the teacher will certainly be fine-tuned.

    A head with other labels is detected only when the data is read.
    """
    if config.teacher.finetune != "auto":
        return config.teacher.finetune == "always"
    own = AutoConfig.from_pretrained(checkpoint_folder(config.teacher.model)).architectures or []
    return not any(name.endswith(TASKS[config.task].heads) for name in own)
