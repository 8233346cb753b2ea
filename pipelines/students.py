"""The students of a run: the one that the settings describe, or one for each speed of the budget."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from transformers import AutoConfig

from compress.precision import MODES
from distill.answers import Answers
from distill.errors import InputError
from distill.tasks.choose import TASKS
from distill.teacher.load import checkpoint_folder
from pipelines.config import DistillConfig
from pipelines.given import by_label_stage
from pipelines.gradual import close_stage
from pipelines.layouts import Layouts
from pipelines.pruning import costs_stage, start_stage
from pipelines.quantizing import quantize_stage
from pipelines.road import name_of
from pipelines.rounds import round_name, round_stage
from pipelines.schemes import quantization_by, schemes_of
from pipelines.scoring import scores_stage
from pipelines.shaping import Inputs, Target, shape_stage, targets_of
from pipelines.stage import Artefact, Run
from pipelines.student import Pruned, student_stage

Stages = dict[str, Artefact]


@dataclass(frozen=True)
class Trained:
    """A trained student.

    Args:
        name: In reports and of its folder: `student`, of a family `student-10x`.
        suffix: Of its stages' names.
        made: The stage that trained it.
        shape: The stage that chose its shape, where it was pruned.
        scheme: By which it was quantized.
    """

    name: str
    suffix: str
    made: Artefact
    shape: Artefact | None = None
    scheme: str = ""


@dataclass(frozen=True)
class Road:
    """What every student of a budget is made with."""

    run: Run
    config: DistillConfig
    given: Inputs
    precision: str
    layouts: Layouts

    def trained(self, pruned: Pruned, epochs: int) -> Artefact:
        config = replace(self.config, train=replace(self.config.train, epochs=epochs))
        given = self.given
        return student_stage(
            self.run, config, given.data, given.teacher, given.cache, self.precision, self.layouts, pruned
        )


def train_students(
    run: Run, config: DistillConfig, made: Mapping[str, Artefact], precision: str, layouts: Layouts
) -> tuple[list[Trained], Stages]:
    """Every student of the run, the largest first, and the stages on the way by name."""
    data, teacher, cache = made["data"], made["teacher"], made.get("cache")
    if config.student.given:
        done = given_stage(run, config, data, teacher)
        return in_few_bits(run, config, made, [Trained("student", "", done)], {"student": done}, precision)
    if not config.budget.asked:
        done = student_stage(run, config, data, teacher, cache, precision, layouts, general=made.get("general"))
        return in_few_bits(run, config, made, [Trained("student", "", done)], {"distill": done}, precision)
    assert cache is not None
    start = start_stage(run, config, data, teacher)
    stages = {"start": start, "costs": costs_stage(run, config, data, teacher, start)}
    stages["scores"] = scores_stage(run, config, data, cache, Pruned("start", start, None, start))
    given = Inputs(data, teacher, cache, start, start, stages["scores"], stages["costs"])
    road = Road(run, config, given, precision, layouts)
    targets, students = targets_of(config.budget), []
    for target in targets:
        stages |= SCHEDULES[config.prune.schedule](road, target)
        done, shape = stages[f"distill-{target.name}"], stages[f"shape-{target.name}"]
        students.append(Trained(name_of(target.name, len(targets)), f"-{target.name}", done, shape))
    return in_few_bits(run, config, made, students, stages, precision)


def given_stage(run: Run, config: DistillConfig, data: Artefact, teacher: Artefact) -> Artefact:
    """The student that is trained already."""
    if config.student.spec == "teacher":
        return teacher
    folder = checkpoint_folder(config.student.spec, "student")
    return by_label_stage(run, "student", folder, data)


def in_few_bits(
    run: Run,
    config: DistillConfig,
    made: Mapping[str, Artefact],
    students: list[Trained],
    stages: Stages,
    precision: str,
) -> tuple[list[Trained], Stages]:
    """The students quantized, where that is asked for: each by every scheme that a format needs."""
    schemes = list(schemes_of(config))
    if not schemes:
        return students, stages
    found = []
    for each in students:
        for scheme in schemes:
            other = f"-{scheme}" if scheme != schemes[0] else ""
            name, suffix = f"{each.name}{other}", f"{each.suffix}{other}"
            how = quantization_by(config, scheme)
            start = Pruned(suffix, each.made, None, stages.get("start"))
            done = quantize_stage(run, config, made["data"], made["teacher"], made["cache"], start, precision, how)
            stages = stages | {f"quantize{suffix}": done}
            found.append(replace(each, name=name, suffix=suffix, made=done, scheme=scheme))
    return found, stages


def oneshot(road: Road, target: Target) -> Stages:
    """Cut, then trained."""
    given = road.given
    shape = shape_stage(road.run, road.config, given, target)
    done = road.trained(Pruned(target.name, given.start, shape, given.words), road.config.train.epochs)
    return {f"shape-{target.name}": shape, f"distill-{target.name}": done}


def iterative(road: Road, target: Target) -> Stages:
    """Cut a part of the way, trained, judged anew and cut further, until the last round meets the target."""
    stages: Stages = {}
    given = road.given
    rounds = shared_out(road.config.train.epochs, road.config.prune.rounds)
    for number, epochs in enumerate(rounds[:-1], 1):
        name = round_name(target, number)
        shape = round_stage(road.run, road.config, given, target, number)
        done = road.trained(Pruned(name, given.start, shape, given.words), epochs)
        start = Pruned(name, done, None, given.words)
        scores = scores_stage(road.run, road.config, given.data, given.cache, start)
        stages |= {f"shape-{name}": shape, f"distill-{name}": done, f"scores-{name}": scores}
        given = replace(given, start=done, scores=scores)
    last = replace(road.config, train=replace(road.config.train, epochs=rounds[-1]))
    return stages | oneshot(replace(road, config=last, given=given), target)


def gradual(road: Road, target: Target) -> Stages:
    """Trained while units close, to the sizes that the shape stage found; cut, then trained on."""
    given, epochs = road.given, road.config.train.epochs
    shape = shape_stage(road.run, road.config, given, target)
    share = min(max(1, round(road.config.prune.gradual * epochs)), epochs - 1)
    closed = close_stage(road.run, road.config, given, shape, target.name, road.precision, share)
    done = road.trained(Pruned(target.name, closed, None, given.words), epochs - share)
    return {f"shape-{target.name}": shape, f"close-{target.name}": closed, f"distill-{target.name}": done}


SCHEDULES = {"oneshot": oneshot, "iterative": iterative, "gradual": gradual}


def shared_out(epochs: int, rounds: int) -> list[int]:
    """Epochs of each round; what doesn't divide goes to the last ones."""
    return [epochs // rounds + (number >= rounds - epochs % rounds) for number in range(rounds)]


def check_schedule(config: DistillConfig, precision: str, layouts: Layouts) -> None:
    """
    Raises:
        InputError: Too few epochs for the schedule, or a gradual one on several processes or in fp16; few bits on
            several processes; pipeline stages for rows that aren't a sample or a position.
    """
    if config.quantize.scheme:
        check_one_process(
            "quantize", "several were never tried; train without --devices, or leave the scheme out", config, layouts
        )
    if config.sparsity.asked:
        check_one_process("sparsity", "each would choose zeros of its own; leave --devices out", config, layouts)
        if precision == "16-mixed" and config.sparsity.score == "movement":
            raise InputError(
                "sparsity.score movement: expected precision 32 or bf16-mixed, found 16-mixed: gradients that are "
                "scaled anew in every step can't be summed into scores"
            )
    check_stages(config, layouts)
    if config.loss.attention or config.loss.relations:
        for whose, layout in (("student", layouts.student), ("teacher", layouts.teacher)):
            if layout.tp > 1 or layout.pp > 1:
                raise InputError(
                    f"loss.attention, loss.relations: expected a {whose} with all heads on each process, found "
                    f"{layout}: a process would compare its own part only; use fsdp"
                )
    if config.general.data and (layouts.student.sharded or layouts.student.pp > 1 or config.machine.strategy):
        raise InputError(
            "general.data: expected a student whose weights are whole on each process, found "
            f"{config.machine.strategy or layouts.student}; use replicated or zero1"
        )
    if config.general.data and config.general.progressive:
        check_one_process("general.progressive", "layers that don't learn have no gradients to send", config, layouts)
    if config.loss.balance and (layouts.student.sharded or layouts.student.pp > 1 or config.machine.strategy):
        raise InputError(
            "loss.balance: expected a student whose weights are whole on each process, found "
            f"{config.machine.strategy or layouts.student}: the gradient of one term alone isn't known there"
        )
    if not MODES[precision].stock:
        check_one_process(f"machine.precision {precision}", "several were never tried", config, layouts)
    if not config.budget.asked:
        return
    schedule, epochs = config.prune.schedule, config.train.epochs
    least = {"oneshot": 1, "iterative": config.prune.rounds, "gradual": 2}[schedule]
    if epochs < least:
        raise InputError(
            f"train.epochs {epochs}: expected at least {least} with prune.schedule {schedule}, for each part of it "
            "trains for one or more"
        )
    if schedule != "gradual":
        return
    why = "each would close units of its own; use iterative or oneshot"
    check_one_process("prune.schedule gradual", why, config, layouts)
    if precision == "16-mixed":
        raise InputError(
            "prune.schedule gradual: expected precision 32 or bf16-mixed, found 16-mixed: gradients that are scaled "
            "anew in every step can't be summed into scores"
        )


def check_stages(config: DistillConfig, layouts: Layouts) -> None:
    """
    Raises:
        InputError: A model that is trained in pipeline stages, and a task whose rows its micro-batches don't tell.
    """
    if config.task not in TASKS or type(TASKS[config.task].answers) is Answers:
        return
    for whose, layout in (("student", layouts.student), ("teacher", layouts.tuned)):
        if layout.pp > 1 and (whose == "student" or is_tuned(config)):
            raise InputError(
                f"{whose}.layout {layout}: expected no pipeline stages for {config.task}, found {layout.pp}: a row of "
                "its answers is neither a sample nor a position, which is what a stage passes on; use fsdp or tp"
            )


def is_tuned(config: DistillConfig) -> bool:
    """Whether the teacher is sure to be fine-tuned; that its head has other labels is known with the data."""
    if config.teacher.finetune != "auto":
        return config.teacher.finetune == "always"
    own = AutoConfig.from_pretrained(checkpoint_folder(config.teacher.model)).architectures or []
    return not any(name.endswith(TASKS[config.task].heads) for name in own)


def check_one_process(name: str, why: str, config: DistillConfig, layouts: Layouts) -> None:
    """
    Raises:
        InputError: The student is trained by several.
    """
    if layouts.student.processes > 1 or config.machine.strategy:
        raise InputError(
            f"{name}: expected one process, found {layouts.student.processes}"
            f"{' and ' + config.machine.strategy if config.machine.strategy else ''}: {why}"
        )
