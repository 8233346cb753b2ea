"""Invalid combinations of layouts, precisions, optimizers and schedules."""

from functools import partial

from distill.data.batches.rank_speeds import parse_speeds
from distill.errors import InputError
from distill.losses.config import LayerSizes, match_layers
from distill.parallel.layout import check_layout_fits
from distill.student.family import ENCODERS
from distill.student.spec import read_norm
from distill.tasks.names import LANGUAGE_HEADS
from distill.train.config import AUTO
from distill.train.optimizer_kinds import OPTIMIZERS, check_optimizer_package
from pipelines.settings.facts import Facts
from pipelines.settings.rules.conditions import (
    find_training_layout,
    has_batchnorm,
    is_on_several,
    is_sharded,
    list_train_configs,
)
from pipelines.settings.rules.rule import Check, Rule
from pipelines.settings.rules.segments import check_segment_task, check_student_segments, check_teacher_segments

NOT_ON_SEVERAL = {  # precisions that train on one process only, and why
    "fp8": "on several it is untested",
    "bf16-stochastic": "replicas would round the same weights differently",
    "int8-mixed": "on several it is untested",
}
GRADUAL_PRECISIONS = ("32", "bf16-mixed")  # in which units can be masked while a student trains
AS_WIDE_AS_HIDDEN = tuple(kind for kind in ENCODERS if kind != "mobilebert")  # families by the width of their features


def check_schedule_epochs(f: Facts) -> None:
    """Checks that the schedule of pruning has enough epochs."""
    s = f.settings
    least = {"oneshot": 1, "iterative": s.prune.rounds, "gradual": 2}[s.prune.schedule]
    if s.budget.requested and s.train.epochs < least:
        raise InputError(
            f"train.epochs {s.train.epochs}: expected at least {least} with prune.schedule {s.prune.schedule}: each "
            "part of it trains for one or more"
        )


def check_optimizer_packages(facts: Facts) -> None:
    """Checks that the packages of the optimizers are installed.

    Raises:
        InputError: One isn't.
    """
    for setting, train in list_train_configs(facts.settings).items():
        check_optimizer_package(train.optimizer, f"{setting}.optimizer")


def check_training_layout(setting: str, facts: Facts) -> None:
    """Checks that the optimizer, the schedule and the memory settings of a training suit its layout.

    Raises:
        InputError: The optimizer needs whole matrices or whole states, or can't round as the precision requires;
            DeepSpeed requires AdamW; the schedule or the backward window needs one process; or activations can't be
            offloaded.
    """
    trainings, machine = list_train_configs(facts.settings), facts.settings.machine
    if setting not in trainings:
        return
    train = trainings[setting]
    name = train.optimizer
    layout = find_training_layout(setting, facts)
    kind = OPTIMIZERS[name]
    if name != "adamw" and machine.deepspeed:
        raise InputError(
            f"{setting}.optimizer {name}: expected adamw with {machine.deepspeed}, which has an AdamW of its own"
        )
    if machine.precision == "bf16-stochastic" and not kind.stochastic:
        known = ", ".join(each for each, other in OPTIMIZERS.items() if other.stochastic)
        raise InputError(
            f"{setting}.optimizer {name}: expected {known} with precision bf16-stochastic, found one that would round "
            "small updates away"
        )
    if train.ema_decay and (machine.deepspeed or layout.zero == 1):
        raise InputError(
            f"{setting}.ema_decay {train.ema_decay}: expected another layout than zero1 and no DeepSpeed, found "
            f"{machine.deepspeed or layout}: their processes have no common average"
        )
    if train.schedule == "find" and (layout.processes > 1 or machine.deepspeed):
        raise InputError(
            f"{setting}.schedule find: expected one process, found {layout.processes}"
            f"{' with DeepSpeed' if machine.deepspeed else ''}: the range test trains on one"
        )
    if train.batch_growth != "none" and (machine.deepspeed or (train.batch_growth == "noise" and layout.processes > 1)):
        found = "DeepSpeed" if machine.deepspeed else f"{layout.processes} processes"
        raise InputError(
            f"{setting}.batch_growth {train.batch_growth}: expected one process, or batch_growth schedule without "
            f"DeepSpeed, found {found}"
        )
    check_memory_layout(setting, facts)
    if train.offload != "none" and (layout.pp > 1 or machine.deepspeed):
        raise InputError(
            f"{setting}.offload activations: expected a layout without pipeline stages and no machine.strategy, found "
            f"{machine.deepspeed or layout}: they run forward and backward passes themselves; use checkpointing"
        )
    if train.backward_window and (layout.processes > 1 or machine.deepspeed):
        raise InputError(
            f"{setting}.backward_window {train.backward_window}: expected one process, found "
            f"{machine.deepspeed or layout}: processes would have to agree on the number of backward passes"
        )
    if (kind.whole and layout.shards_gradients) or (layout.zero == 1 and not kind.zero1):
        raise InputError(
            f"{setting}.optimizer {name}: expected layout replicated{' or zero1' if kind.zero1 else ''}"
            f"{'' if kind.whole else ', or sharded weights'}, found {layout}: it can't update shards; use adamw"
        )


def trains_in_stages(f: Facts, layout: str) -> bool:
    """Returns whether a layout, `student_layout` or `finetuning_layout`, is that of a training in pipeline stages."""
    is_trained = layout == "student_layout" or f.settings.teacher.finetune != "never"
    return is_trained and getattr(f, layout).pp > 1


def check_memory_layout(setting: str, facts: Facts) -> None:
    """Checks that a training that is fit into memory can be measured step by step.

    Raises:
        InputError: It is on-policy, in pipeline stages or by DeepSpeed, or its batch can't be split.
    """
    s, train = facts.settings, list_train_configs(facts.settings)[setting]
    layout = find_training_layout(setting, facts)
    wanted = {
        "machine.memory": s.machine.memory,
        f"{setting}.checkpointing": train.checkpointing == AUTO and AUTO,
        f"{setting}.batch_size": train.batch_size == AUTO and AUTO,
    }
    name, value = next(((name, value) for name, value in wanted.items() if value), ("", ""))
    if not name:
        return
    found = "DeepSpeed" if s.machine.deepspeed else f"{layout.pp} pipeline stages" if layout.pp > 1 else ""
    found = found or ("sequences that the student generates" if setting == "train" and s.on_policy.share else "")
    if found:
        raise InputError(f"{name} {value}: expected a training whose steps can be measured alone, found {found}")
    if train.batch_size == AUTO and (layout.processes > 1 or train.batch_tokens):
        found = f"{layout.processes} processes" if layout.processes > 1 else f"batch_tokens {train.batch_tokens}"
        raise InputError(
            f"{setting}.batch_size auto: expected one process and no batch_tokens, found {found}; set a number"
        )


def check_rank_speeds(f: Facts) -> None:
    """Checks that there is a speed for each replica."""
    assert f.student_layout is not None
    parse_speeds(f.settings.machine.rank_speeds, f.student_layout.dp)


def check_layout_sizes(f: Facts) -> None:
    """Checks that heads and layers can be divided as the layouts request."""
    for name, layout, sizes in (
        ("teacher.layout", f.teacher_layout, f.teacher_sizes),
        ("student.layout", f.student_layout, f.student_sizes),
        ("teacher.layout", f.finetuning_layout, f.teacher_sizes),
    ):
        if layout is not None and sizes is not None:
            check_layout_fits(layout, sizes.heads, sizes.key_value_heads, len(sizes.layers), name)


def check_language_heads(f: Facts) -> None:
    """Checks that the teacher and the student have a language-model head."""
    ends = LANGUAGE_HEADS.get(f.task or "")
    for checkpoint in (f.teacher, f.student):
        if ends and checkpoint is not None and not any(name.endswith(ends) for name in checkpoint.architectures):
            raise InputError(
                f"model {checkpoint.name!r}: expected a head for {f.task} ({', '.join(ends)}), found "
                f"{', '.join(checkpoint.architectures) or 'no architecture'}: a new head would have to learn every "
                "token from scratch"
            )


def check_layer_terms(f: Facts) -> None:
    """Checks that the models have the layers that the loss refers to.

    Only encoders whose feature vectors all have the width of their hidden states are checked here.
    """
    sizes = f.teacher_sizes, f.student_sizes
    kinds = {each.model_type for each in (f.teacher, f.student) if each is not None}
    if None in sizes or f.task == "sentence-embedding" or not kinds <= {*AS_WIDE_AS_HIDDEN}:
        return
    teacher, student = (LayerSizes(len(each.layers), each.hidden, each.heads) for each in sizes if each is not None)
    match_layers(f.settings.loss, student, teacher)


LAYOUT_RULES: tuple[Rule | Check, ...] = (
    Check(check_layout_sizes),
    Check(partial(check_segment_task, "student"), ("task", "student_layout")),
    Check(partial(check_segment_task, "teacher"), ("task", "teacher_layout")),
    Check(check_student_segments, ("student_layout",)),
    Check(check_teacher_segments, ("teacher_layout",)),
    Check(check_language_heads, ("task",)),
    Check(check_layer_terms, ("task", "teacher")),
    *(
        Rule(
            lambda s, f, who=who: (
                getattr(s, who).offload  # type: ignore[misc]
                and getattr(f, f"{who}_layout").fsdp == 1
                and getattr(f, f"{who}_layout").zero != 2
            ),
            f"{who}.offload: expected {who}.layout fsdp=N or zero2, found {{f.{who}_layout}}: only weights that FSDP "
            "shards can be offloaded",
            (f"{who}_layout",),
        )
        for who in ("teacher", "student")
    ),
    Rule(
        lambda s, f: (
            s.machine.rank_speeds
            and f.student_layout is not None
            and (f.student_layout.processes == 1 or f.student_layout.shards_gradients)
        ),
        "machine.rank_speeds {s.machine.rank_speeds}: expected replicas (student.layout replicated or zero1), found "
        "{f.student_layout}: processes that share weights compute together, the fastest no earlier than the slowest",
        ("student_layout",),
    ),
    Check(check_rank_speeds, ("student_layout",)),
    Rule(
        lambda s, f: (
            s.machine.gradient_compression != "none"
            and f.student_layout is not None
            and f.student_layout.shards_gradients
        ),
        "machine.gradient_compression {s.machine.gradient_compression}: expected student.layout replicated or zero1, "
        "found "
        "{f.student_layout}: only replicas exchange whole gradients; leave one of the two out",
        ("student_layout",),
    ),
    Rule(
        lambda s, f: s.student.pipeline_split == "time" and f.student_layout is not None and f.student_layout.pp == 1,
        "student.pipeline_split time: expected a student.layout with pipeline stages, such as pp=2, found "
        "{f.student_layout}: there is nothing to divide; leave it out",
        ("student_layout",),
    ),
    Rule(
        lambda s, f: s.machine.gradient_compression != "none" and s.machine.deepspeed,
        "machine.gradient_compression {s.machine.gradient_compression}: expected no machine.strategy, found "
        "{s.machine.strategy}, which "
        "exchanges gradients itself; leave one of the two out",
    ),
    Rule(
        lambda s, f: s.quantize.scheme and is_on_several(f),
        "quantize: expected one process, found {f.student_processes}: quantization-aware training "
        "on several is untested; train without --devices, or leave the scheme out",
        ("student_layout",),
    ),
    Rule(
        lambda s, f: s.sparsity.requested and is_on_several(f),
        "sparsity: expected one process, found {f.student_processes}: each would choose different "
        "zeros; leave --devices out",
        ("student_layout",),
    ),
    Rule(
        lambda s, f: has_batchnorm(s, f) and is_on_several(f),
        "student norm=batchnorm: expected one process, found {f.student_processes}: each would normalize by the "
        "statistics of its own rows; leave --devices out",
        ("student_layout",),
    ),
    Rule(
        lambda s, f: (
            read_norm(s.student.spec)
            and f.student_layout is not None
            and (f.student_layout.tp > 1 or f.student_layout.pp > 1)
        ),
        "student {s.student.spec!r}: expected student.layout replicated, zero1, zero2 or fsdp with norm=, found "
        "{f.student_layout}: tensor parallelism and pipeline stages are for stock classes",
        ("student_layout",),
    ),
    Rule(
        lambda s, f: s.sparsity.requested and f.precision == "16-mixed" and s.sparsity.score == "movement",
        "sparsity.score movement: expected precision 32 or bf16-mixed, found 16-mixed: gradients whose loss scale "
        "changes from step to step can't be summed into scores",
        ("precision",),
    ),
    *(
        Rule(
            lambda s, f, who=who: (
                s.loss.computes("attention", "relations")  # type: ignore[misc]
                and (getattr(f, f"{who}_layout").tp > 1 or getattr(f, f"{who}_layout").pp > 1)
            ),
            f"loss.attention, loss.relations: expected a {who} with all heads on each process, found "
            f"{{f.{who}_layout}}: a process would compare its own part only; use fsdp",
            (f"{who}_layout",),
        )
        for who in ("student", "teacher")
    ),
    Rule(
        lambda s, f: s.general.data and is_sharded(f),
        "general.data: expected a student whose weights are whole on each process, found {f.student_layout} "
        "{s.machine.deepspeed}; use replicated or zero1",
        ("student_layout",),
    ),
    Rule(
        lambda s, f: s.general.data and s.general.progressive_share and is_on_several(f),
        "general.progressive_share: expected one process, found {f.student_processes}: layers that aren't "
        "trained have no gradients to send",
        ("student_layout",),
    ),
    Rule(
        lambda s, f: s.loss.balance_every and is_sharded(f),
        "loss.balance_every: expected a student whose weights are whole on each process, found {f.student_layout} "
        "{s.machine.deepspeed}: the gradient of a single term isn't available",
        ("student_layout",),
    ),
    *(
        Rule(
            lambda s, f, name=name: f.precision == name and is_on_several(f),  # type: ignore[misc]
            f"machine.precision {name}: expected one process, found {{f.student_processes}}: {reason}; use bf16-mixed",
            ("precision", "student_layout"),
        )
        for name, reason in NOT_ON_SEVERAL.items()
    ),
    *(
        Rule(
            lambda s, f, layout=layout: f.precision == "16-mixed" and trains_in_stages(f, layout),  # type: ignore[misc]
            f"machine.precision 16-mixed: expected a {who} without pipeline stages, found {{f.{layout}}}: stages run "
            f"the backward pass of losses that aren't scaled; use bf16-mixed, fsdp or tp{hint}",
            ("precision", layout),
        )
        for who, layout, hint in (
            ("student", "student_layout", ""),
            ("teacher that may be fine-tuned", "finetuning_layout", ", or teacher.finetune never"),
        )
    ),
    *(
        Rule(
            lambda s, f, layout=layout: (  # type: ignore[misc]
                f.task in ("multi-label", "question-answering") and trains_in_stages(f, layout)
            ),
            f"task {{f.task}}: expected a {who} without pipeline stages, found {{f.{layout}}}: stages compute the loss "
            "of one class for each row; use fsdp or tp",
            ("task", layout),
        )
        for who, layout in (("student", "student_layout"), ("teacher that may be fine-tuned", "finetuning_layout"))
    ),
    Rule(
        lambda s, f: f.precision == "16-mixed" and s.machine.deepspeed,
        "machine.precision 16-mixed: expected 32 or bf16-mixed with machine.strategy {s.machine.deepspeed}: "
        "DeepSpeed's own loss scaling is untested; use bf16-mixed, or student.layout zero1, zero2 or fsdp=N",
        ("precision",),
    ),
    Rule(
        lambda s, f: f.precision == "16-mixed" and s.machine.gradient_compression == "powersgd",
        "machine.gradient_compression powersgd: expected precision 32 or bf16-mixed, found 16-mixed: an overflow "
        "would stay in "
        "what powersgd carries over to the next step; use fp16 or bf16",
        ("precision",),
    ),
    Check(check_optimizer_packages),
    *(
        Check(partial(check_training_layout, name), (layout,))
        for name, layout in (
            ("train", "student_layout"),
            ("general.train", "student_layout"),
            ("teacher_train", "finetuning_layout"),
            ("attention_free_train", "student_layout"),
        )
    ),
    Check(check_schedule_epochs),
    Rule(
        lambda s, f: s.budget.requested and s.prune.schedule == "gradual" and is_on_several(f),
        "prune.schedule gradual: expected one process, found {f.student_processes}: each would "
        "remove different units; use iterative or oneshot",
        ("student_layout",),
    ),
    Rule(
        lambda s, f: s.prune.nested and f.precision not in ("32", "bf16-mixed", "16-mixed"),
        "prune.nested: expected precision 32, bf16-mixed or 16-mixed, found {f.precision}: slices are taken of weights "
        "in float32",
        ("precision",),
    ),
    Rule(
        lambda s, f: s.prune.nested and is_on_several(f),
        "prune.nested: expected one process, found {f.student_processes}: each would have a part of every weight, of "
        "which no slice can be taken",
        ("student_layout",),
    ),
    Rule(
        lambda s, f: s.budget.requested and s.prune.schedule == "gradual" and f.precision not in GRADUAL_PRECISIONS,
        "prune.schedule gradual: expected precision 32 or bf16-mixed, found {f.precision}: scores need gradients that "
        "aren't scaled, and gates need linear layers and weights that aren't converted",
        ("precision",),
    ),
    Rule(
        lambda s, f: s.budget.requested and s.prune.schedule == "gradual" and s.train.batch_growth != "none",
        "train.batch_growth {s.train.batch_growth}: expected none with prune.schedule gradual, found growing batches: "
        "they take fewer steps than the schedule has, so that the last units would never be masked",
    ),
)
