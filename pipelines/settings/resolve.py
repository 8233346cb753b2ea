"""From settings to the plan of a run: everything is decided and checked here, once, before the first stage."""

from dataclasses import replace
from typing import TYPE_CHECKING

from compress.prune.budget import parse_bytes
from distill.checkpoint.checkpoint import Checkpoint, open_checkpoint
from distill.data.clean.config import is_person
from distill.errors import InputError
from distill.losses.config import LayerSizes, match_layers
from distill.student.spec import is_relative
from distill.tasks.names import LANGUAGE_TASKS
from pipelines.settings.attention_free_names import name_attention_free_students
from pipelines.settings.commands.distill import DistillConfig
from pipelines.settings.defaults import fill_defaults, fill_task_defaults
from pipelines.settings.facts import Facts
from pipelines.settings.layouts import Layouts, count_parameters, layout_settings, resolve_layout
from pipelines.settings.lengths import check_lengths, fitted_length
from pipelines.settings.places import open_local
from pipelines.settings.plan import RunPlan
from pipelines.settings.rules.table import check_rules
from pipelines.settings.tokenizers import build_cross_tokenizer_rows, is_cross_tokenizer, load_checked_tokenizer

if TYPE_CHECKING:
    from distill.tasks.task import Task


def examine_settings(settings: DistillConfig, processes: int) -> Facts:
    """Returns what is known about a run without torch, which takes seconds to import, after applying all rules to it.

    Raises:
        InputError: A checkpoint or data set on this machine is missing or damaged, or a rule rejects the settings.
        CompressError: As above, from a check of the compress package.
    """
    settings = fill_defaults(settings)
    check_rules(Facts(settings, processes))
    teacher = open_local(settings.teacher.model, "teacher")
    for name in settings.teacher.additional:
        open_local(name, "teacher")
    student = None if is_relative(settings.student.spec) else open_local(settings.student.spec, "student")
    task = settings.task if settings.task != "auto" else (teacher.task if teacher is not None else "")
    teacher_layout, student_layout, finetuning_layout = (each.parsed() for each in layout_settings(settings, processes))
    facts = Facts(
        fill_task_defaults(settings, task) if task else settings,
        processes,
        task or None,
        teacher,
        student,
        teacher_layout,
        student_layout,
        finetuning_layout,
        None if settings.machine.precision == "auto" else settings.machine.precision,
        opened=True,
    )
    check_rules(facts)
    return facts


def resolve(settings: DistillConfig, processes: int, *, reads_weights: bool = True) -> RunPlan:
    """Returns the plan of a run.

    Args:
        settings: The settings as the user wrote them.
        processes: Number of processes of the run.
        reads_weights: Whether this process also reads the weights, to check that they are finite; one of several is
            enough.

    Raises:
        InputError: The models, the data and the settings can't be used together.
        CompressError: As above, from a check of the compress package.
    """
    requested, facts = settings.task, examine_settings(settings, processes)

    from distill.tasks.choose import TASKS, choose_task
    from pipelines.settings.hardware_checks import check_accelerator

    settings = facts.settings
    check_accelerator(settings.machine.accelerator)
    teacher = facts.teacher or open_checkpoint(settings.teacher.model, "teacher")
    task, reason = choose_task(requested, teacher.config, teacher.name, settings.data)
    settings = fill_task_defaults(settings, task)
    student = facts.student
    if student is None and not is_relative(settings.student.spec):
        student = open_checkpoint(settings.student.spec, "student")
    facts = replace(facts, settings=settings, task=task, teacher=teacher, student=student)
    check_rules(facts)
    settings, own_tokenizer, note = check_models(facts, TASKS[task](()), reads_weights=reads_weights)
    facts = replace(facts, settings=settings, own_tokenizer=own_tokenizer)
    check_rules(facts)
    return complete_plan(facts, f"{reason}{note}")


def check_models(facts: Facts, task: "Task", *, reads_weights: bool) -> tuple[DistillConfig, bool, str]:
    """Checks the teacher's and the student's checkpoints and tokenizers.

    Returns:
        (settings with the text length, whether the student has its own tokenizer, note on the text length)

    Raises:
        InputError: A checkpoint is quantized already or incomplete, was trained for another task, or has fewer
            positions than a length in the settings; or the tokenizers can't be used together.
    """
    from distill.checkpoint.tokenizer import check_fast
    from distill.tasks.class_biases import check_head_biases
    from distill.teacher.fingerprint import check_same_tokenizer

    settings, teacher, student = facts.settings, facts.teacher, facts.student
    assert teacher is not None
    for each in (teacher, student):
        if each is not None and settings.quantize.scheme:
            check_unquantized_checkpoint(each)
    task.check(teacher.config, teacher.name)
    if settings.fit_class_biases:
        check_head_biases(teacher.config, task.auto)
    tokenizer = load_checked_tokenizer(teacher, task)
    check_fast(tokenizer, "teacher", "the student's could not be compared with it")
    models = {"teacher": (teacher.config, tokenizer)}
    differs = False
    if student is not None:
        task.check(student.config, student.name)
        if settings.fit_class_biases:
            check_head_biases(student.config, task.auto)
        student_tokenizer = load_checked_tokenizer(student, task)
        differs = is_cross_tokenizer(settings, tokenizer, student_tokenizer)
        if differs:
            check_rules(replace(facts, own_tokenizer=True))
        else:
            check_same_tokenizer(tokenizer, student_tokenizer, student.name)
            student_tokenizer.model_max_length = tokenizer.model_max_length  # student and teacher use the same tokens
        models["student"] = (student.config, student_tokenizer)
    length, note = fitted_length(settings.data.max_length, task, models)
    settings = replace(settings, data=replace(settings.data, max_length=length))
    if differs:
        build_cross_tokenizer_rows(
            settings, models["student"][1], tokenizer, [], length
        )  # raises what the student stage would
    new_head = settings.task not in LANGUAGE_TASKS
    task.check_weights(teacher.folder, "teacher", new_head=new_head, finite=reads_weights)
    if student is not None:
        new_head = new_head and not settings.student.trained
        task.check_weights(student.folder, "student", new_head=new_head, finite=reads_weights)
    return settings, differs, note


def check_unquantized_checkpoint(checkpoint: Checkpoint) -> None:
    """Checks that a checkpoint that is to be quantized isn't quantized already.

    Raises:
        InputError: The checkpoint is quantized.
    """
    from compress.quantize.store import QUANTIZATION_FILE, is_quantized

    is_stored = is_quantized(checkpoint.folder)
    if is_stored or "quantization_config" in checkpoint.description:
        where = QUANTIZATION_FILE if is_stored else "quantization_config in config.json"
        raise InputError(
            f"{checkpoint.role} {str(checkpoint.folder)!r}: expected a checkpoint in float, found one that is already "
            f"quantized ({where}): rounding it again would lose accuracy; start from the checkpoint it was made from"
        )


def complete_plan(facts: Facts, task_reason: str) -> RunPlan:
    """Returns the plan, after the checks that need the configs of both models.

    Raises:
        InputError: A layout doesn't fit a model, or the loss refers to layers that the models don't have.
    """
    from distill.models.layer_sizes import read_layer_sizes
    from distill.student.build import student_config

    settings, teacher, student = facts.settings, facts.teacher, facts.student
    assert teacher is not None
    config = student.config if student is not None else student_config(teacher.config, settings.student.spec)
    for spec in name_attention_free_students(settings.student).values():
        student_config(teacher.config, spec)  # rejects sizes that aren't possible
    other_teachers = open_teachers(settings, teacher)
    teacher_sizes, student_sizes = read_layer_sizes(teacher.config), read_layer_sizes(config)
    check_general(settings, teacher, teacher_sizes, student_sizes)
    match_layers(settings.loss, student_sizes, teacher_sizes)
    models = {"teacher": teacher.config, "student": config, "finetuning": teacher.config}
    layouts = Layouts(
        **{each.model: resolve_layout(each, models[each.model]) for each in layout_settings(settings, facts.processes)}
    )
    sizes = teacher_sizes, student_sizes
    readers = open_proposer(settings, teacher), open_name_tagger(settings)
    plan = RunPlan(
        settings, task_reason, teacher, other_teachers, student, config, *sizes, layouts, facts.processes, *readers
    )
    plan.check_precision(facts.precision)
    check_pipeline_stages(plan)
    check_memory_floor(plan)
    check_lengths(settings, {"teacher": teacher.config} | ({"student": student.config} if student is not None else {}))
    return plan


def open_teachers(settings: DistillConfig, first: Checkpoint) -> tuple[Checkpoint, ...]:
    """Returns the checkpoints of further teachers.

    Raises:
        InputError: A teacher was trained for another task, is incomplete, or uses another tokenizer.
    """
    if not settings.teacher.additional:
        return ()
    from distill.tasks.text_classification import TextClassification, check_classifier
    from distill.teacher.fingerprint import check_same_tokenizer

    teachers = tuple(open_checkpoint(name, "teacher") for name in settings.teacher.additional)
    for each in teachers:
        check_classifier(each.config, each.name)
        TextClassification(()).check_weights(each.folder, "teacher", new_head=True)
        check_same_tokenizer(first.load_tokenizer(), each.load_tokenizer(), each.name, "teacher")
    return teachers


def open_proposer(settings: DistillConfig, teacher: Checkpoint) -> Checkpoint | None:
    """Returns the masked language model that augmentation takes words from; None if it doesn't.

    Raises:
        InputError: It has no head for masked tokens.
    """
    from distill.tasks.language import MaskedLM

    if "masked" not in settings.augment.find_rates():
        return None
    name = settings.augment.model
    proposer = open_checkpoint(name, "augment.model") if name else teacher
    if not any(each.endswith(MaskedLM.heads) for each in proposer.architectures):
        raise InputError(
            "data.augment masked: expected a masked language model in augment.model, or as teacher, found "
            f"{', '.join(proposer.architectures) or 'no class'} in {str(proposer.folder)!r}: it can't propose words"
        )
    return proposer


def open_name_tagger(settings: DistillConfig) -> Checkpoint | None:
    """Returns the tagger that finds the names of persons for cleaning; None if they stay.

    Raises:
        InputError: It is no tagger, or has no label of persons.
    """
    if not settings.clean.tagger:
        return None
    tagger = open_checkpoint(settings.clean.tagger, "clean.tagger")
    labels = [str(label) for label in dict(tagger.description.get("id2label") or {}).values()]
    if tagger.task != "token-classification" or not any(map(is_person, labels)):
        raise InputError(
            "clean.tagger: expected a token classifier with a label PER or PERSON, found "
            f"{', '.join(tagger.architectures) or 'no class'} with {', '.join(labels[:8])} in {str(tagger.folder)!r}: "
            "it finds no names of persons"
        )
    return tagger


def check_general(
    settings: DistillConfig, teacher: Checkpoint, teacher_sizes: LayerSizes, student_sizes: LayerSizes
) -> None:
    """Checks that the teacher has the layers and the head that distillation on plain text refers to.

    Raises:
        InputError: It lacks a layer, or the masked-language-modelling head that kl and ce need.
    """
    from distill.tasks.language import MaskedLM
    from distill.train.steps.progressive import check_layer_coverage

    general = settings.general
    if not general.data:
        return
    if general.loss.uses_outputs and not any(name.endswith(MaskedLM.heads) for name in teacher.architectures):
        raise InputError(
            "general.loss: kl and ce use the predictions of masked tokens, so expected a teacher with a "
            f"masked-language-modelling head, found {', '.join(teacher.architectures) or 'none'}; use hidden, "
            "attention or relations"
        )
    pairs = match_layers(general.loss, student_sizes, teacher_sizes)
    if general.progressive_share:
        check_layer_coverage(pairs, student_sizes.layers)


def check_pipeline_stages(plan: RunPlan) -> None:
    """Checks that models trained in pipeline stages have a row of outputs per sample or position.

    Raises:
        InputError: The task has other rows, which can't be assigned to micro-batches.
    """
    from distill.tasks.choose import TASKS
    from distill.tasks.logit_rows import OutputRows

    if type(TASKS[plan.task].output_rows) is OutputRows:
        return
    for who, layout in (("student", plan.layouts.student), ("teacher", plan.layouts.finetuning)):
        if layout.pp > 1 and (who == "student" or is_finetuned(plan)):
            raise InputError(
                f"{who}.layout {layout}: expected no pipeline stages for {plan.task}, found {layout.pp}: a row of its "
                "outputs is neither a sample nor a position, which is what stages exchange; use fsdp or tp"
            )


_LEAST_BYTES = 9  # per trained parameter: the fp32 weight, its gradient, and AdamW's moments in 4 bits each


def check_memory_floor(plan: RunPlan) -> None:
    """Checks that weights, gradients and the smallest optimizer states fit into the memory budget, without activations.

    Raises:
        InputError: They don't fit.
    """
    setting = plan.settings.machine.memory
    if not setting or setting == "auto":
        return
    from compress.measure.memory import read_resident_memory

    budget, resident = parse_bytes(setting, "machine.memory"), read_resident_memory()
    models = {"student": (plan.student_config, plan.layouts.student)}
    if is_finetuned(plan):
        models["teacher"] = (plan.teacher.config, plan.layouts.finetuning)
    for who, (config, layout) in models.items():
        least = resident + _LEAST_BYTES * count_parameters(config) // layout.shards
        if budget < least:
            raise InputError(
                f"machine.memory {setting}: expected at least {least / 1e6:,.0f} MB to train the {who}, without its "
                f"activations ({resident / 1e6:,.0f} MB for libraries, the rest for weights, gradients and optimizer "
                "states); use a smaller model or more memory"
            )


def is_finetuned(plan: RunPlan) -> bool:
    """Returns whether the teacher will certainly be fine-tuned.

    A head with other labels is detected only when the data is read.
    """
    from distill.tasks.choose import TASKS

    finetune = plan.settings.teacher.finetune
    if finetune != "auto":
        return finetune == "always"
    return not any(name.endswith(TASKS[plan.task].heads) for name in plan.teacher.architectures)
