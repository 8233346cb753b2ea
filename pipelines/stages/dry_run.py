"""What a dry run prints: the plan, sizes estimated from configurations and row counts, and the predicted stages."""

import copy
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import PretrainedConfig

from distill.cache import Dense
from distill.cache.preflight import ROW_BYTES, SIGNAL_BYTES
from distill.data.splits.examples import Splits
from distill.models.layer_sizes import read_layer_sizes
from distill.tasks.choose import TASKS
from distill.tasks.language import Language
from distill.tasks.task import Task
from pipelines.runs.stage import Run
from pipelines.settings.commands.distill import DistillConfig
from pipelines.settings.layouts import count_parameters
from pipelines.settings.plan import RunPlan
from pipelines.stages.cache.signals import make_signal, name_cached_task
from pipelines.stages.cache.stage import choose_signals
from pipelines.stages.prediction import CHARACTERS_PER_TOKEN, Prediction, predict_stages
from pipelines.stages.prepare.compared_texts import as_plain_texts
from pipelines.stages.prepare.data import read_task_splits
from pipelines.stages.run_stages import run_stages


def planned_sizes(plan: RunPlan) -> list[tuple[str, str]]:
    """Returns (label, value) rows with the sizes of the data, models, cache and training of a run."""
    data = plan.settings.data
    with TemporaryDirectory(prefix="stillroom-") as scratch:
        return describe_sizes(plan, read_task_splits(plan.task, data, plan.settings.seed, Path(scratch)))


def describe_sizes(plan: RunPlan, splits: Splits) -> list[tuple[str, str]]:
    """Returns (label, value) rows with the sizes of a run with these splits."""
    config, task, task_class = plan.settings, plan.task, TASKS[plan.task]
    teacher, student = copy.deepcopy(plan.teacher.config), copy.deepcopy(plan.student_config)
    for each in (teacher, student):
        if splits.labels:
            each.num_labels = len(splits.labels)
    teacher_params, student_params = (count_parameters(each, task_class(()).auto) for each in (teacher, student))
    rows = count_training_rows(config, task_class, splits)
    noun = "documents" if issubclass(task_class, Language) else "texts"
    general = config.general
    blocks = f"{general.blocks:,} blocks" if general.blocks else "all"
    is_cached = config.loss.needs_teacher and not config.teacher.online
    bytes_per_text = count_cached_bytes(config, teacher, student, task_class) if is_cached else 0
    steps = config.train.epochs * -(-rows // (config.train.rows * config.train.accumulate))
    duration = "" if config.train.batch_tokens else f", {steps} steps"  # rows aren't encoded yet: lengths are unknown
    synthetic = ", more with the synthetic rows" if config.augment.requested else ""
    return [
        ("train / validation / test", f"{len(splits.train)} / {len(splits.validation)} / {len(splits.test)} {noun}"),
        *([("unlabelled", f"{len(splits.unlabelled)} texts")] if noun == "texts" else []),
        *([("plain text", f"{blocks} of {general.data}, {general.train.epochs} epochs")] if general.data else []),
        ("task", f"{task}, {len(splits.labels)} label{'s' * (len(splits.labels) > 1)}" if splits.labels else task),
        ("teacher", f"{teacher_params / 1e6:.1f}M parameters, {4 * teacher_params / 1e6:.0f} MB"),
        ("student", f"{student_params / 1e6:.1f}M parameters, {4 * student_params / 1e6:.0f} MB"),
        *([("cache", f"at most {rows * bytes_per_text / 1e6:.1f} MB{synthetic}")] if is_cached else []),
        ("student training", f"{config.train.epochs} epochs{duration}{synthetic if duration else ''}"),
    ]


def count_training_rows(config: DistillConfig, task: type[Task], splits: Splits) -> int:
    """Returns the number of rows that a student is trained on, of a language model approximately."""
    if not issubclass(task, Language):
        return len(splits.train) + len(splits.unlabelled)
    characters = sum(map(len, as_plain_texts(splits.train).texts))
    return -(-characters // (CHARACTERS_PER_TOKEN * config.data.max_length))


def count_cached_bytes(
    config: DistillConfig, teacher: PretrainedConfig, student: PretrainedConfig, task: type[Task]
) -> float:
    """Returns the maximum number of bytes that a text takes in the cache."""
    keep = choose_signals(config, task, read_layer_sizes(teacher), read_layer_sizes(student))
    signals = [make_signal(name, name_cached_task(task), keep, teacher, 0) for name in keep.signals.split(",")]
    length = config.data.max_length
    content = sum(
        signal.nominal_bytes() * (1 if isinstance(signal, Dense) and signal.each == "sample" else length)
        for signal in signals
    )
    return content + ROW_BYTES + len(signals) * SIGNAL_BYTES


def show_plan(run: Run, plan: RunPlan) -> None:
    """Prints the plan, the stages with their planned actions, and the estimated sizes."""
    settings = plan.settings
    run_stages(run, plan)
    run.console.table("Settings", ("what", "decided"), plan.rows())
    run.console.table("Plan", ("stage", "what would happen", "where"), run.plan)
    run.console.table("Sizes", ("what", "size"), planned_sizes(plan))
    if settings.predict and plan.processes == 1:
        print_predictions(run, plan)
    run.console.say("dry run: nothing was written")


def print_predictions(run: Run, plan: RunPlan) -> None:
    """Prints the memory and time of the stages, measured on a sample of the data."""
    predictions, rejection = predict_stages(plan, run.console)
    if not predictions:
        run.console.say("  there is no stage whose memory and time could be predicted")
        return
    predictions.append(
        Prediction("all", max(each.peak for each in predictions), sum(each.seconds for each in predictions))
    )
    rows = [(each.stage, f"{each.peak / 1e6:,.0f} MB", f"{each.seconds:,.0f} s") for each in predictions]
    run.console.table("Predicted from a sample of the data", ("stage", "peak memory", "time"), rows)
    if rejection:
        run.console.say(
            f"the stages after these can't be predicted, because the sample's student was rejected: {rejection}"
        )
