"""The students of a run: the student that the settings describe, or one for each target speed of the budget."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from distill.errors import InputError
from pipelines.reports.pruning_summary import UNREACHED, student_name
from pipelines.runs.stage import Artefact, Run
from pipelines.settings.attention_free_names import name_attention_free_students
from pipelines.settings.commands.distill import DistillConfig
from pipelines.settings.plan import RunPlan, SpeedTarget, list_targets, round_name
from pipelines.settings.schemes import list_schemes, quantization_by
from pipelines.stages.prepare.label_order import label_order_stage
from pipelines.stages.prune.costs import costs_stage
from pipelines.stages.prune.cut import cut_stage
from pipelines.stages.prune.faster_shape import faster_shape_stage
from pipelines.stages.prune.gradual import gradual_masking_stage
from pipelines.stages.prune.importance import scores_stage
from pipelines.stages.prune.rounds import round_stage
from pipelines.stages.prune.shape import read_correction, shape_stage
from pipelines.stages.prune.shape_inputs import ShapeInputs
from pipelines.stages.prune.start import pruning_start_stage
from pipelines.stages.train.distill import student_stage
from pipelines.stages.train.nested import NestedTraining, nested_stage, slice_stage
from pipelines.stages.train.quantize import quantize_stage
from pipelines.stages.train.student_start import StudentStart

Stages = dict[str, Artefact]


@dataclass(frozen=True)
class TrainedStudent:
    """A trained student.

    Args:
        name: Name in reports and of its folder: `student`, or for several students for example `student-10x`.
        suffix: Suffix of its stages' names.
        stage: The stage that trained it.
        shape: The stage that chose its shape, if it was pruned.
        scheme: The quantization scheme, if it was quantized.
        target: The speed that it was pruned to, if it was.
    """

    name: str
    suffix: str
    stage: Artefact
    shape: Artefact | None = None
    scheme: str = ""
    target: SpeedTarget | None = None


@dataclass(frozen=True)
class PruningContext:
    """The inputs and settings shared by all students of a budget."""

    run: Run
    plan: RunPlan
    inputs: ShapeInputs
    precision: str

    @property
    def config(self) -> DistillConfig:
        """The run's settings."""
        return self.plan.settings

    def with_epochs(self, epochs: int) -> "PruningContext":
        """Returns the same with another number of training epochs."""
        settings = replace(self.config, train=replace(self.config.train, epochs=epochs))
        return replace(self, plan=replace(self.plan, settings=settings))

    def train(self, pruned: StudentStart, epochs: int) -> Artefact:
        """Trains a pruned student for `epochs` epochs."""
        plan, inputs = self.with_epochs(epochs).plan, self.inputs
        return student_stage(self.run, plan, inputs.data, inputs.teacher, inputs.cache, self.precision, pruned)


def train_students(
    run: Run, plan: RunPlan, earlier: Mapping[str, Artefact], precision: str
) -> tuple[list[TrainedStudent], Stages]:
    """Returns all students of the run, the largest first, and the stages that built them by name.

    `earlier` are the stages before them: data, teacher, and if requested cache and general.
    """
    config, data, teacher = plan.settings, earlier["data"], earlier["teacher"]
    if config.budget.requested and not config.student.trained:
        students, stages = prune_students(run, plan, earlier, precision)
    elif config.student.trained:
        stage = trained_student_stage(run, plan, data, teacher)
        students, stages = [TrainedStudent("student", "", stage)], {"student": stage}
    else:
        cache, general = earlier.get("cache"), earlier.get("general")
        stage = student_stage(run, plan, data, teacher, cache, precision, general=general)
        students, stages = [TrainedStudent("student", "", stage)], {"distill": stage}
    return quantize_students(run, config, earlier, students, stages, precision)


def prune_students(
    run: Run, plan: RunPlan, earlier: Mapping[str, Artefact], precision: str
) -> tuple[list[TrainedStudent], Stages]:
    """Returns the students of a budget, and the stages that built them.

    They are one for each target speed, without those that no shape of a frontier reaches, and those without attention.

    Raises:
        InputError: There would be no student.
    """
    config, data, teacher, cache = plan.settings, earlier["data"], earlier["teacher"], earlier["cache"]
    start = pruning_start_stage(run, plan, data, teacher)
    stages = {"start": start, "costs": costs_stage(run, config, data, teacher, start)}
    stages["scores"] = scores_stage(run, config, data, cache, StudentStart("start", start, None, start))
    pipeline = build_pruning_context(run, plan, {**earlier, **stages}, precision)
    targets = list_targets(config.budget)
    if config.prune.nested:
        stages |= prune_nested(pipeline, targets)
    else:
        for target in targets:
            stages |= prune_to(pipeline, target)
    students = [collect_student(stages, each, len(targets)) for each in targets if f"distill-{each.name}" in stages]
    attention_free = train_attention_free_students(run, plan, earlier, precision)
    students += [TrainedStudent(f"student-{name}", f"-{name}", stage) for name, stage in attention_free.items()]
    if not students:
        raise InputError(
            f"budget.speedup {config.budget.speedup}: expected a speed that a pruned model reaches, found none; "
            f"{stages[f'shape-{targets[0].name}'].metrics[UNREACHED]}"
        )
    return students, stages | {f"distill-{name}": stage for name, stage in attention_free.items()}


def train_attention_free_students(run: Run, plan: RunPlan, earlier: Mapping[str, Artefact], precision: str) -> Stages:
    """Returns name -> stage of each student without attention, trained on the same signals as the pruned ones."""
    config, stages = plan.settings, {}
    for name, spec in name_attention_free_students(config.student).items():
        student = replace(config.student, spec=spec)
        train, loss = config.attention_free_train, config.loss.without_layer_terms
        settings = replace(config, student=student, train=train, loss=loss)
        student_plan = replace(plan, settings=settings, student=None)
        data, teacher, cache = earlier["data"], earlier["teacher"], earlier["cache"]
        stages[name] = student_stage(run, student_plan, data, teacher, cache, precision, name=name)
    return stages


def build_pruning_context(run: Run, plan: RunPlan, stages: Mapping[str, Artefact], precision: str) -> PruningContext:
    """Returns the inputs of all pruned students, from the stages by name."""
    names = {"tokens": "start"}  # both are the same stage, until a round of the iterative schedule replaces the start
    inputs = ShapeInputs(**{each.name: stages[names.get(each.name, each.name)] for each in fields(ShapeInputs)})
    return PruningContext(run, plan, inputs, precision)


def prune_to(pipeline: PruningContext, target: SpeedTarget, previous: Artefact | None = None) -> Stages:
    """Returns the stages that prune a student to a target and train it; see `choose_shape` for `previous`."""
    return SCHEDULES[pipeline.config.prune.schedule](pipeline, target, previous)


def collect_student(stages: Stages, target: SpeedTarget, targets: int) -> TrainedStudent:
    """Returns a target's student, from the stages by name; `targets` is the number of targets of the run."""
    stage, shape = stages[f"distill-{target.name}"], stages[f"shape-{target.name}"]
    return TrainedStudent(student_name(target.name, targets), f"-{target.name}", stage, shape, target=target)


def choose_shape(pipeline: PruningContext, target: SpeedTarget, previous: Artefact | None = None) -> Artefact:
    """Returns the stage that chooses the shape for a target, or corrects a `previous` shape that was too slow.

    Raises:
        InputError: No shape is as fast, and this isn't a frontier, but an earlier run with the same search was.
    """
    if previous is not None:
        return faster_shape_stage(pipeline.run, pipeline.config, pipeline.inputs, target, previous, pipeline.precision)
    shape = shape_stage(pipeline.run, pipeline.config, pipeline.inputs, target, pipeline.precision)
    if UNREACHED in shape.metrics and not pipeline.config.budget.frontier:
        raise InputError(shape.metrics[UNREACHED])
    return shape


def trained_student_stage(run: Run, plan: RunPlan, data: Artefact, teacher: Artefact) -> Artefact:
    """Returns the stage of a student that is already trained."""
    return teacher if plan.student is None else label_order_stage(run, plan.student, data)


def quantize_students(
    run: Run,
    config: DistillConfig,
    earlier: Mapping[str, Artefact],
    students: list[TrainedStudent],
    stages: Stages,
    precision: str,
) -> tuple[list[TrainedStudent], Stages]:
    """Returns the students quantized with every scheme that a format needs, or unchanged if none was requested."""
    schemes = list(list_schemes(config))
    if not schemes:
        return students, stages
    data, cache, quantized = earlier["data"], earlier["cache"], []
    for student in students:
        for scheme in schemes:
            addition = f"-{scheme}" if scheme != schemes[0] else ""
            name, suffix = f"{student.name}{addition}", f"{student.suffix}{addition}"
            start = StudentStart(suffix, student.stage, None, stages.get("start"))
            settings = quantization_by(config, scheme)
            stage = quantize_stage(run, config, data, earlier["teacher"], cache, start, precision, settings)
            stages = stages | {f"quantize{suffix}": stage}
            quantized.append(replace(student, name=name, suffix=suffix, stage=stage, scheme=scheme))
    return quantized, stages


def prune_at_once(pipeline: PruningContext, target: SpeedTarget, previous: Artefact | None = None) -> Stages:
    """Prunes to the target at once, then trains, unless no shape of a frontier reaches it."""
    inputs = pipeline.inputs
    shape = choose_shape(pipeline, target, previous)
    if UNREACHED in shape.metrics:
        return {f"shape-{target.name}": shape}
    stage = pipeline.train(inputs.begin(pipeline.config, target.name, shape), pipeline.config.train.epochs)
    return {f"shape-{target.name}": shape, f"distill-{target.name}": stage}


def prune_nested(
    pipeline: PruningContext, targets: Sequence[SpeedTarget], previous: Mapping[str, Artefact] | None = None
) -> Stages:
    """Searches each target's shape within that of the slower one, and trains all of them as one set of weights.

    Args:
        pipeline: Inputs and settings of the family.
        targets: The slowest first.
        previous: Target -> shape, of the same family when students of it were too slow.

    Returns:
        The stages by name; none if a target, corrected for a `previous` family, is reached by no shape.

    Raises:
        InputError: A target of the first family is reached by no shape.
    """
    run, config, initial = pipeline.run, pipeline.config, pipeline.inputs
    try:
        stages = choose_nested_shapes(pipeline, targets, previous)
    except InputError as error:
        if previous is None:
            raise
        run.console.say(f"  {error}")
        return {}
    shapes = {each.name: stages[f"shape-{each.name}"] for each in targets}
    first, *others = shapes
    start = initial.begin(config, first, shapes[first])
    training = NestedTraining(
        run, pipeline.plan, initial.data, initial.teacher, initial.cache, pipeline.precision, start, None, shapes
    )
    nested = stages[f"distill-{first}"] = nested_stage(training)
    return stages | {f"distill-{name}": slice_stage(run, config, initial.data, nested, name) for name in others}


def choose_nested_shapes(
    pipeline: PruningContext, targets: Sequence[SpeedTarget], previous: Mapping[str, Artefact] | None
) -> Stages:
    """Returns the stages of the shapes, and of the models that the next shape is chosen within.

    Of a `previous` family, the shapes before the first corrected one stay, that one loses units, and the ones within it
    are searched anew.

    Raises:
        InputError: A target is reached by no shape.
    """
    stages: Stages = {}
    inputs, is_changed = pipeline.inputs, False
    for number, target in enumerate(targets, 1):
        context, name = replace(pipeline, inputs=inputs), f"shape-{target.name}"
        if previous is None or is_changed:
            stages[name] = choose_shape(context, target)
        elif target.correction == read_correction(previous[target.name]):
            stages[name] = previous[target.name]
        else:
            stages[name], is_changed = choose_shape(context, target, previous[target.name]), True
        if not stages[name].metrics.get("faster", True):
            raise InputError(f"{name}: no faster shape was found")
        if number < len(targets):
            cut = stages[f"cut-{target.name}"] = cut_stage(context.run, inputs, stages[name], target.name)
            inputs = replace(inputs, start=cut, scores=cut)
    return stages


def prune_iteratively(pipeline: PruningContext, target: SpeedTarget, previous: Artefact | None = None) -> Stages:
    """Alternates partial pruning, training and new importance scores, until the last round meets the target.

    A correction changes the last round only.
    """
    stages: Stages = {}
    inputs = pipeline.inputs
    rounds = split_epochs(pipeline.config.train.epochs, pipeline.config.prune.rounds)
    for number, epochs in enumerate(rounds[:-1], 1):
        name = round_name(target, number)
        shape = round_stage(pipeline.run, pipeline.config, inputs, target.uncorrected, number)
        stage = pipeline.train(inputs.begin(pipeline.config, name, shape), epochs)
        start = StudentStart(name, stage, None, inputs.tokens)
        scores = scores_stage(pipeline.run, pipeline.config, inputs.data, inputs.cache, start)
        stages |= {f"shape-{name}": shape, f"distill-{name}": stage, f"scores-{name}": scores}
        inputs = replace(inputs, start=stage, scores=scores)
    last = replace(pipeline.with_epochs(rounds[-1]), inputs=inputs)
    return stages | prune_at_once(last, target, previous)


def prune_gradually(pipeline: PruningContext, target: SpeedTarget, previous: Artefact | None = None) -> Stages:
    """Closes units while training, down to the sizes of the shape stage, then removes them and trains on."""
    inputs, epochs = pipeline.inputs, pipeline.config.train.epochs
    shape = choose_shape(pipeline, target, previous)
    masking_epochs = count_masking_epochs(pipeline.config)
    masked = gradual_masking_stage(
        pipeline.run, pipeline.config, inputs, shape, target.name, pipeline.precision, masking_epochs
    )
    stage = pipeline.train(StudentStart(target.name, masked, None, inputs.tokens), epochs - masking_epochs)
    return {f"shape-{target.name}": shape, f"mask-{target.name}": masked, f"distill-{target.name}": stage}


SCHEDULES = {"oneshot": prune_at_once, "iterative": prune_iteratively, "gradual": prune_gradually}


def plan_epochs(config: DistillConfig, target: SpeedTarget) -> dict[str, int]:
    """Returns the epochs of each stage that trains a pruned student for the target, by the stage's name."""
    epochs, last = config.train.epochs, f"distill-{target.name}"
    if config.prune.nested and target != list_targets(config.budget)[0]:
        return {}
    if config.prune.schedule == "iterative":
        *earlier, final = split_epochs(epochs, config.prune.rounds)
        return {f"distill-{round_name(target, n)}": each for n, each in enumerate(earlier, 1)} | {last: final}
    if config.prune.schedule == "gradual":
        masking = count_masking_epochs(config)
        return {f"mask-{target.name}": masking, last: epochs - masking}
    return {last: epochs}


def count_masking_epochs(config: DistillConfig) -> int:
    """Returns the epochs in which a gradual schedule closes units; at least one follows."""
    return min(max(1, round(config.prune.gradual_share * config.train.epochs)), config.train.epochs - 1)


def split_epochs(epochs: int, rounds: int) -> list[int]:
    """Returns the number of epochs of each round; the last rounds get the remainder."""
    return [epochs // rounds + (number >= rounds - epochs % rounds) for number in range(rounds)]
