"""Every combination that a run refuses, in one table, in the order in which the rules are applied.

Ranges of single settings, and combinations inside the settings of one component (`LossConfig`, `Budget`,
`QuantizeConfig`, …), are checked where that component's dataclass is defined, because it can be used without a run.
A rule is applied as soon as the facts that it needs are known: most before torch is imported.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from compress.export.common.targets import by_scheme, check_float, check_installed, formats_of
from compress.prune.budget import Budget
from distill.checkpoint.head_task import same_head
from distill.checkpoint.norm_kinds import BATCHNORM
from distill.data.augment.config import DRAWN
from distill.data.augment.lexicon import read_lexicon
from distill.data.augment.templates import read_slot_templates
from distill.data.batches.rank_speeds import parse_speeds
from distill.data.clean.config import check_clean_packages
from distill.errors import InputError
from distill.losses.config import LAYER_MAPS, LAYER_TERMS, LayerSizes, LossConfig, check_sparse_signals, match_layers
from distill.parallel.layout import Layout, check_layout_fits
from distill.student.family import ENCODERS
from distill.student.norms import check_family_kind
from distill.student.spec import check_spec, parse_spec, read_norm
from distill.tasks.names import LANGUAGE, LANGUAGE_HEADS, WRITING, default_signal
from distill.train.config import AUTO, TrainConfig
from distill.train.optimizer_kinds import OPTIMIZERS, check_optimizer_package
from pipelines.settings.commands.cache import KeepConfig
from pipelines.settings.commands.distill import DistillConfig
from pipelines.settings.deepspeed_json import check_strategy
from pipelines.settings.defaults import default_loss
from pipelines.settings.engines import check_engine_package
from pipelines.settings.facts import Facts
from pipelines.settings.machine_facts import check_machine
from pipelines.settings.places import check_data, is_url, path_exists
from pipelines.settings.rules.asynchronous import check_asynchronous, check_replica_precision
from pipelines.settings.rules.nested import check_nested
from pipelines.settings.rules.segments import check_segment_task, check_student_segments, check_teacher_segments
from pipelines.settings.rules.vector_students import check_vector_student, check_vectors_beside
from pipelines.settings.schemes import check_processor
from pipelines.settings.task_settings import STORED_FORM, run_task_arguments

NOT_ON_SEVERAL = {  # precisions that train on one process only, and why
    "fp8": "on several it is untested",
    "bf16-stochastic": "replicas would round the same weights differently",
    "int8-mixed": "on several it is untested",
}
AS_WIDE_AS_HIDDEN = tuple(kind for kind in ENCODERS if kind != "mobilebert")  # families by the width of their features


@dataclass(frozen=True)
class Rule:
    """A combination that is refused.

    Args:
        refuses: Returns whether the settings `s` and the facts `f` are refused.
        message: Template of the error message, with `{s.…}` and `{f.…}`.
        needs: Names of the facts that have to be known before the rule is applied.
    """

    refuses: Callable[[DistillConfig, Facts], object]
    message: str
    needs: tuple[str, ...] = ()

    def apply(self, facts: Facts) -> None:
        """Raises an InputError if the combination is refused."""
        if self.refuses(facts.settings, facts):
            raise InputError(self.message.format(s=facts.settings, f=facts))


@dataclass(frozen=True)
class Check:
    """A check that a component makes of itself, with messages of its own.

    Args:
        apply: Raises an InputError or a CompressError if the facts are refused.
        needs: As in `Rule`.
    """

    apply: Callable[[Facts], None]
    needs: tuple[str, ...] = ()


def check_rules(facts: Facts, about: tuple[str, ...] = ()) -> None:
    """Applies all rules whose facts are known.

    Args:
        facts: The settings and what is known.
        about: Names of facts; only rules that need one of them are applied. Empty: all rules.

    Raises:
        InputError: A combination is refused; the first one in the order of the table is reported.
        CompressError: As above, from a check of the compress package.
    """
    for rule in RULES:
        if about and not set(about) & set(rule.needs):
            continue
        if all(getattr(facts, name) is not None for name in rule.needs):
            rule.apply(facts)


# ---- Conditions and checks that are longer than a line


def lacks_cached_logits(s: DistillConfig) -> bool:
    """Returns whether the loss needs cached logits that the run has no stage for."""
    return not ((s.loss.computes("kl") or s.loss.uses_vectors) and s.teacher.signals == "cached")


def is_sharded(f: Facts) -> bool:
    """Returns whether no process has all of the student's weights."""
    layout = f.student_layout
    return layout is not None and (layout.sharded or layout.pp > 1 or bool(f.settings.machine.deepspeed))


def is_on_several(f: Facts) -> bool:
    """Returns whether several processes, or DeepSpeed, train the student."""
    layout = f.student_layout
    return layout is not None and (layout.processes > 1 or bool(f.settings.machine.deepspeed))


def has_step(settings: DistillConfig, name: str) -> bool:
    """Returns whether cleaning has a step."""
    return any(step.name == name for step in settings.clean.find_steps())


def is_drawn(settings: DistillConfig) -> bool:
    """Returns whether augmentation draws whole rows."""
    return any(kind in DRAWN for kind in settings.augment.find_rates())


def check_augment_files(f: Facts) -> None:
    """Checks the lexicon and the templates of augmentation.

    Raises:
        InputError: A file is missing or has another form, or a template has a slot without fillers.
    """
    augment = f.settings.augment
    if augment.lexicon:
        read_lexicon(Path(augment.lexicon).expanduser())
    if augment.templates:
        read_slot_templates(Path(augment.templates).expanduser())


def check_schedule_epochs(f: Facts) -> None:
    """Checks that the schedule of pruning has enough epochs."""
    s = f.settings
    least = {"oneshot": 1, "iterative": s.prune.rounds, "gradual": 2}[s.prune.schedule]
    if s.budget.requested and s.train.epochs < least:
        raise InputError(
            f"train.epochs {s.train.epochs}: expected at least {least} with prune.schedule {s.prune.schedule}: each "
            "part of it trains for one or more"
        )


def is_head_of_another_task(f: Facts) -> bool:
    """Returns whether the teacher has the head of another task."""
    own = f.teacher.task if f.teacher is not None else ""
    return bool(own and f.task and same_head(own) != same_head(f.task))


def trainings_of(s: DistillConfig) -> dict[str, TrainConfig]:
    """Returns the settings of each kind of training, by their name."""
    return {"train": s.train, "general.train": s.general.train, "teacher_train": s.teacher_train}


def layout_of(setting: str, facts: Facts) -> Layout:
    """Returns the layout of a training, which is known by then."""
    layout = facts.tuned_layout if setting == "teacher_train" else facts.student_layout
    assert layout is not None
    return layout


def check_optimizer_packages(facts: Facts) -> None:
    """Checks that the packages of the optimizers are installed.

    Raises:
        InputError: One isn't.
    """
    for setting, train in trainings_of(facts.settings).items():
        check_optimizer_package(train.optimizer, f"{setting}.optimizer")


def check_training_layout(setting: str, facts: Facts) -> None:
    """Checks that the optimizer, the schedule and the memory settings of a training suit its layout.

    Raises:
        InputError: The optimizer needs whole matrices or whole states, or can't round as the precision requires;
            DeepSpeed requires AdamW; the schedule or the backward window needs one process; or activations can't be
            offloaded.
    """
    train, machine = trainings_of(facts.settings)[setting], facts.settings.machine
    name = train.optimizer
    layout = layout_of(setting, facts)
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
    if train.average and (machine.deepspeed or layout.zero == 1):
        raise InputError(
            f"{setting}.average {train.average}: expected another layout than zero1 and no DeepSpeed, found "
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
            f"{setting}.batch_growth {train.batch_growth}: expected one process, or schedule without DeepSpeed, found "
            f"{found}"
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
    if (kind.whole and (layout.sharded or layout.zero == 2)) or (layout.zero == 1 and not kind.zero1):
        raise InputError(
            f"{setting}.optimizer {name}: expected layout replicated{' or zero1' if kind.zero1 else ''}"
            f"{'' if kind.whole else ', or sharded weights'}, found {layout}: it can't update shards; use adamw"
        )


def check_memory_layout(setting: str, facts: Facts) -> None:
    """Checks that a training that is fit into memory can be measured step by step.

    Raises:
        InputError: It is on-policy, in pipeline stages or by DeepSpeed, or its batch can't be split.
    """
    s, train = facts.settings, trainings_of(facts.settings)[setting]
    layout = layout_of(setting, facts)
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


def has_batchnorm(s: DistillConfig, f: Facts) -> bool:
    """Returns whether the student is built with batch norms, or is a checkpoint that has them."""
    stored = f.student.description.get("norms", {}) if f.student is not None else {}
    return read_norm(s.student.spec) == BATCHNORM or BATCHNORM in stored.values()


def check_norms(facts: Facts) -> None:
    """Checks that a student of the teacher's family can have the requested normalisation.

    Raises:
        InputError: It can't.
    """
    spec = facts.settings.student.spec
    assert facts.teacher is not None
    norm = read_norm(spec)
    if norm and not parse_spec(spec).is_blocks:
        check_family_kind(norm, facts.teacher.model_type)


def has_other_norms(f: Facts) -> bool:
    """Returns whether the model to prune has norms of another kind than its stock class."""
    return any("norms" in each.description for each in (f.teacher, f.student) if each is not None)


def check_window_rows(f: Facts) -> None:
    """Checks that a backward window gets rows of one document each.

    Raises:
        InputError: They are packed.
    """
    s = f.settings
    if window_settings(s) and f.task in WRITING and run_task_arguments(s, f.task).get("packing") == "documents":
        raise InputError(
            f"{window_settings(s)[0]}.backward_window: expected data.packing none{' or stream' * (f.task != 'chat')}, "
            f"found documents{' by default' * (s.data.packing == 'auto')}: keys of a document would be carried into "
            "the next one in its row"
        )


def check_window_layers(f: Facts) -> None:
    """Checks that the layers of the models that are trained in a backward window keep keys and values.

    Raises:
        InputError: One has another kind of state.
    """
    trained = {"train": f.student or f.teacher, "teacher_train": f.teacher}
    for setting in window_settings(f.settings):
        checkpoint = trained.get(setting)
        kinds = [] if checkpoint is None else checkpoint.description.get("layer_types") or []
        other = sorted({*kinds} - {"full_attention", "sliding_attention"})
        if checkpoint is not None and other:
            raise InputError(
                f"{setting}.backward_window: expected layers of full_attention or sliding_attention, found "
                f"{', '.join(other)} in {checkpoint.name!r}: their state isn't keys and values that could be carried on"
            )


def window_settings(s: DistillConfig) -> list[str]:
    """Returns the names of the trainings that have a backward window."""
    return [name for name, train in trainings_of(s).items() if train.backward_window]


def teaches_single_layers(s: DistillConfig) -> bool:
    """Returns whether the loss of the general phase pairs each layer of the student with one layer of the teacher."""
    loss = s.general.loss
    named = loss.layer_map in LAYER_MAPS and loss.layer_map != "uniform"
    return not (named or loss.balance or loss.ramps)


def check_formats(f: Facts) -> None:
    """Checks that the formats to export suit the task and are installed."""
    formats = formats_of(f.settings.export)
    if f.settings.quantize.scheme:
        by_scheme(formats, f.settings.quantize.scheme)
    else:
        check_float(formats, "a student without --quantize")
    check_installed(formats)


def check_deepspeed(f: Facts) -> None:
    """Checks that DeepSpeed is installed."""
    if f.settings.machine.deepspeed:
        check_strategy(f.settings.machine.deepspeed)


def check_run_engine(f: Facts) -> None:
    """Checks that Ray is installed where it is to start the processes, and that nothing else does.

    Raises:
        InputError: It isn't, or the strategy starts processes itself.
    """
    machine = f.settings.machine
    if machine.engine == "ray" and machine.asynchronous:
        raise InputError(
            f"machine.engine ray: expected a layout, DeepSpeed or no strategy, found machine.strategy "
            f"{machine.strategy}, which starts its replicas itself on this machine"
        )
    if machine.engine == "ray" and is_url(f.settings.output):
        raise InputError(
            f"output {f.settings.output!r}: expected a folder that all nodes share with engine ray, found a URL: its "
            "workers may be on several machines"
        )
    check_engine_package(machine.engine, "machine.engine")


def check_rank_speeds(f: Facts) -> None:
    """Checks that there is a speed for each replica."""
    assert f.student_layout is not None
    parse_speeds(f.settings.machine.rank_speeds, f.student_layout.dp)


def check_general_text(f: Facts) -> None:
    """Checks that the general phase has text for its kind of model."""
    data = f.settings.general.data
    if data and not path_exists(data, "general.data"):
        raise InputError(f"general.data {data!r}: expected a file or a folder with text, found nothing there")


def check_ignored_budget(f: Facts) -> None:
    """Checks that no setting of the budget is set that has no effect without a target speed."""
    budget, plain = f.settings.budget, Budget()
    if budget.requested:
        return
    kept = ("min_score",) if f.settings.quantize.scheme else ()
    for name in ("max_bytes", "uniform", "min_score"):
        if getattr(budget, name) != getattr(plain, name) and name not in kept:
            raise InputError(
                f"budget.{name}: expected a speedup, latency_ms or texts_per_second beside it, found "
                f"{getattr(budget, name)} alone: nothing is pruned without one"
            )


def check_task_packing(f: Facts) -> None:
    """Checks that the packing suits the task."""
    run_task_arguments(f.settings, f.task or "")


def check_ignored_keep(f: Facts) -> None:
    """Checks that no setting of keep is set that the task or the loss determines."""
    plain, language = KeepConfig(), f.task in LANGUAGE
    default = plain.signals if language else default_signal(f.task or "")
    used = (*STORED_FORM, *(("signals", "draws", "k", "step") if language else ()))
    changed = {name: value for name, value in asdict(f.settings.keep).items() if value != getattr(plain, name)}
    for name, value in changed.items():
        if name not in used and (name, value) != ("signals", default):
            raise InputError(
                f"keep.{name}: expected none for {f.task}, found {value!r}: the loss determines what is stored; of "
                f"keep only {', '.join(used)} have an effect"
            )


def check_stored_part(f: Facts) -> None:
    """Checks that the loss can be computed from the part of a language model's output that is stored."""
    s = f.settings
    stored = default_signal(f.task or "") if s.keep.signals == "auto" else s.keep.signals
    if f.task in LANGUAGE and s.teacher.signals == "cached" and stored != "logits":
        check_sparse_signals(s.loss, stored)


def check_layout_sizes(f: Facts) -> None:
    """Checks that heads and layers can be divided as the layouts request."""
    for name, layout, sizes in (
        ("teacher.layout", f.teacher_layout, f.teacher_sizes),
        ("student.layout", f.student_layout, f.student_sizes),
        ("teacher.layout", f.tuned_layout, f.teacher_sizes),
    ):
        if layout is not None and sizes is not None:
            check_layout_fits(layout, sizes.heads, sizes.groups, len(sizes.layers), name)


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


def across_rule(setting: str, expected: str, refuses: Callable[[DistillConfig], object]) -> Rule:
    """Returns a rule for a student with its own tokenizer."""
    return Rule(
        lambda s, f: f.own_tokenizer and refuses(s),
        f"{setting}: expected {expected} for a student with its own tokenizer, found {{s.{setting}}}: token positions "
        "of teacher and student differ (student {s.student.spec!r})",
        ("own_tokenizer",),
    )


# ---- The table

RULES: tuple[Rule | Check, ...] = (
    # The student, and what is done to it
    Check(lambda f: check_spec(f.settings.student.spec)),
    Rule(
        lambda s, f: s.budget.requested and s.student.given,
        "budget: expected none with student.given, found a target speed: a trained student is quantized as it is; "
        "pipelines.prune and pipelines.distill prune and quantize",
    ),
    Check(check_ignored_budget),
    Check(check_vector_student),
    Check(check_vectors_beside),
    Check(check_nested),
    Rule(
        lambda s, f: s.budget.requested and read_norm(s.student.spec),
        "student {s.student.spec!r}: expected no norm= with a budget, found one: a student with other normalisations "
        "can't be pruned; build it smaller",
    ),
    Rule(
        lambda s, f: s.budget.requested and has_other_norms(f),
        "budget: expected a model with the normalisations of its stock class, found one with others: it can't be "
        "pruned; build it smaller",
        ("opened",),
    ),
    Rule(
        lambda s, f: read_norm(s.student.spec) and f.task == "sentence-embedding",
        "student {s.student.spec!r}: expected no norm= for sentence-embedding, found one: sentence encoders are stored "
        "with a stock body",
        ("task",),
    ),
    Rule(
        lambda s, f: (
            has_batchnorm(s, f) and (s.train.checkpointing != "none" or s.general.train.checkpointing != "none")
        ),
        "student norm=batchnorm: expected train.checkpointing none, found another: the second forward pass would count "
        "a batch in the running statistics twice",
    ),
    Check(check_norms, ("teacher",)),
    Rule(
        lambda s, f: (
            s.student.given and ((f.is_student_built and s.student.spec != "teacher") or not s.quantize.scheme)
        ),
        "student.given: expected a checkpoint or teacher, and a quantize.scheme, found {s.student.spec!r} and scheme "
        "{s.quantize.scheme!r}: there is nothing to do",
    ),
    Rule(
        lambda s, f: s.budget.requested and lacks_cached_logits(s),
        "budget: a pruned student recovers on the teacher's cached logits, so expected loss.kl above 0 and "
        "teacher.signals cached, found kl {s.loss.kl:g} and {s.teacher.signals}",
    ),
    Rule(
        lambda s, f: s.quantize.scheme and lacks_cached_logits(s),
        "quantize: a quantized student is trained on the teacher's cached logits, so expected loss.kl above 0 and "
        "teacher.signals cached, found kl {s.loss.kl:g} and {s.teacher.signals}",
    ),
    Rule(
        lambda s, f: s.budget.requested and s.prune.embedding_rank and s.budget.uniform,
        "prune.embedding_rank: expected 0 with budget.uniform, found {s.prune.embedding_rank}: no stock class has a "
        "factorised token embedding; leave one of the settings out",
    ),
    Rule(
        lambda s, f: s.sparsity.requested and s.train.patience,
        "train.patience {s.train.patience}: expected 0 with sparsity.pattern: the weights with the best score may be "
        "from before the last zeros were set",
    ),
    Check(check_formats),
    Check(lambda f: check_processor(f.settings)),
    Check(lambda f: check_machine(f.settings.machine.accelerator, f.settings.machine.precision)),
    # What is stored of the teacher
    Rule(
        lambda s, f: s.keep.temperature is not None or s.keep.signals not in ("auto", "sampled", "topk", "logits"),
        "keep: expected signals sampled, topk or logits and no temperature, found {s.keep.signals} and "
        "{s.keep.temperature}: the loss determines the other signals and the temperature",
    ),
    # Processes
    Rule(
        lambda s, f: s.machine.restarts and s.machine.devices == 1 and s.machine.engine == "torchrun",
        "machine.restarts {s.machine.restarts}: expected machine.devices of 2 or more, found 1: a single process has "
        "no parent process that could restart it",
    ),
    Check(check_run_engine),
    Rule(
        lambda s, f: s.teacher.ranks and s.teacher.ranks >= f.processes,
        "teacher.ranks {s.teacher.ranks}: expected fewer than the {f.processes} processes, because the student needs "
        "some; start more (--devices, or torchrun)",
    ),
    Check(check_deepspeed),
    Check(check_asynchronous),
    Check(check_replica_precision, ("precision",)),
    Rule(
        lambda s, f: s.machine.deepspeed and s.student.layout not in ("auto", "replicated"),
        "machine.strategy {s.machine.strategy!r}: expected student.layout auto, found {s.student.layout!r}: DeepSpeed "
        "shards the student itself; leave one of the two out",
    ),
    # Files
    Check(lambda f: check_data(f.settings.data.path, f.settings.data.subset), ("opened",)),
    Check(check_general_text, ("opened",)),
    # Distillation on plain text
    Rule(
        lambda s, f: s.general.data and s.budget.requested,
        "general.data: expected a student that is built and trained, found a budget, whose students are pruned from "
        "the teacher; leave one of the two out, or prune the result of this run in a second run",
    ),
    Rule(
        lambda s, f: s.general.data and (s.student.given or s.student.spec == "teacher"),
        "general.data: expected a student that is built and trained, found one that is already trained; leave "
        "general.data out",
    ),
    Rule(
        lambda s, f: not s.general.loss.needs_teacher,
        "general.loss: expected a term that uses the teacher, found ce alone: nothing would be distilled",
    ),
    Rule(
        lambda s, f: s.general.train.patience,
        "general.train.patience: expected 0, found {s.general.train.patience}: plain text has no validation score",
    ),
    Rule(
        lambda s, f: s.general.progressive and not teaches_single_layers(s),
        "general.progressive: expected loss.layer_map uniform or pairs, no ramps and no balance, found "
        "{s.general.loss.layer_map}, {s.general.loss.ramps} and {s.general.loss.balance}: a layer that is trained "
        "alone needs one layer of the teacher",
    ),
    Rule(
        lambda s, f: s.general.progressive == 1 and s.general.loss.uses_outputs,
        "general.progressive: expected less than 1 with kl or ce, found 1: these terms train the whole student, after "
        "its layers",
    ),
    Rule(
        lambda s, f: s.general.progressive and not s.general.loss.computes(*LAYER_TERMS),
        "general.progressive: expected a term on layers (hidden, attention, relations), found kl alone: a single layer "
        "outputs no tokens",
    ),
    # Cleaning
    Check(lambda facts: check_clean_packages(facts.settings.clean.find_steps())),
    Rule(
        lambda s, f: s.clean.requested and f.task in ("question-answering", "chat"),
        "data.clean {s.clean.steps}: expected another task than {f.task}: answers are found by their position in the "
        "text, and conversations have roles; clean the file beforehand",
        ("task",),
    ),
    Rule(
        lambda s, f: has_step(s, "names") and f.task == "token-classification",
        "data.clean: step names: expected a task on whole texts, found {f.task}: words are cleaned one by one, and a "
        "name is found by the words around it",
        ("task",),
    ),
    Rule(
        lambda s, f: has_step(s, "labels") and f.task not in ("text-classification", "multi-label"),
        "data.clean: step labels: expected text-classification or multi-label, found {f.task}: doubtful labels are "
        "found by the probabilities of classes",
        ("task",),
    ),
    Rule(
        lambda s, f: has_step(s, "labels") and f.processes > 1,
        "data.clean: step labels: expected one process, found {f.processes}: the teacher of each fold is trained on "
        "one; clean with --devices 1 and --until teacher first, and run the same command on several",
    ),
    # Augmentation
    Rule(
        lambda s, f: s.augment.requested and f.task in ("masked-lm", "causal-lm", "chat"),
        "data.augment {s.augment.kinds}: expected a task on rows of text with answers, found {f.task}: a language "
        "model would learn the changes themselves",
        ("task",),
    ),
    Rule(
        lambda s, f: s.augment.requested and f.task == "question-answering" and is_drawn(s),
        "data.augment {s.augment.kinds}: expected kinds that change a row, found templates or ngrams: a context that "
        "is drawn has no answer",
        ("task",),
    ),
    Rule(
        lambda s, f: (
            s.augment.agreement and f.task not in ("text-classification", "multi-label", "token-classification")
        ),
        "augment.agreement {s.augment.agreement:g}: expected text-classification, multi-label or token-classification, "
        "found {f.task}: the overlap of probabilities compares classes",
        ("task",),
    ),
    Rule(
        lambda s, f: s.augment.requested and s.augment.labels == "teacher" and not s.loss.needs_teacher,
        "augment.labels teacher: expected a loss with a term of the teacher, found loss.ce alone: the student would "
        "learn nothing from synthetic rows; set augment.labels to row",
    ),
    Rule(
        lambda s, f: s.augment.requested and s.student.given,
        "data.augment {s.augment.kinds}: expected a student that is trained, found one that is used as it is: "
        "synthetic rows would be made for nothing",
    ),
    Check(check_augment_files),
    # Selection
    Rule(
        lambda s, f: (
            s.select.requested and f.task in ("masked-lm", "causal-lm", "chat") and s.select.method != "random"
        ),
        "data.select {s.select.method}: expected random for {f.task}, whose rows are joined into blocks",
        ("task",),
    ),
    Rule(
        lambda s, f: (
            s.select.requested
            and f.task != "text-classification"
            and (s.select.method == "balanced" or s.select.needs_dynamics or s.select.needed_score == "loss")
        ),
        "data.select {s.select.method}: expected text-classification, found {f.task}: rows have no single class",
        ("task",),
    ),
    Rule(
        lambda s, f: (
            s.select.needs_outputs and f.task not in ("text-classification", "multi-label", "token-classification")
        ),
        "data.select {s.select.method}: expected text-classification, multi-label or token-classification, found "
        "{f.task}: difficulty is judged by the probabilities of classes",
        ("task",),
    ),
    Rule(
        lambda s, f: s.select.requested and s.augment.ratio,
        "data.select {s.select.method}: expected augment.ratio 0, found {s.augment.ratio:g}: the synthetic rows that "
        "are left have no fixed ratio",
    ),
    Rule(
        lambda s, f: s.select.needs_dynamics and f.processes > 1,
        "data.select {s.select.method}: expected one process, found {f.processes}: the teacher's training is recorded "
        "on one; set machine.devices to 1",
    ),
    Rule(
        lambda s, f: s.select.requested and s.student.given,
        "data.select {s.select.method}: expected a student that is trained, found one that is used as it is",
    ),
    Rule(
        lambda s, f: s.select.target and not path_exists(s.select.target, "select.target"),
        "select.target: expected a file or folder, found none at {s.select.target!r}",
    ),
    # Sampling
    Rule(
        lambda s, f: s.sampling.by != "uniform" and s.augment.ratio,
        "sampling.by {s.sampling.by}: expected augment.ratio 0, found {s.augment.ratio:g}: both choose the rows of an "
        "epoch",
    ),
    Rule(
        lambda s, f: (
            (s.sampling.by != "uniform" or s.augment.ratio)
            and any((s.train.batch_tokens, s.loss.computes(*LAYER_TERMS) and s.sampling.unbiased))
        ),
        "sampling.by {s.sampling.by}, augment.ratio {s.augment.ratio:g}: expected batches of rows and, with "
        "sampling.unbiased, kl and ce alone, found train.batch_tokens {s.train.batch_tokens}, loss.hidden "
        "{s.loss.hidden:g}, attention {s.loss.attention:g} and relations {s.loss.relations:g}: the number of batches "
        "would differ between epochs, and terms on layers have no rows to weigh",
    ),
    Rule(
        lambda s, f: s.sampling.by == "balanced" and f.task != "text-classification",
        "sampling.by balanced: expected text-classification, found {f.task}: its rows have no single class",
        ("task",),
    ),
    Rule(
        lambda s, f: (
            s.sampling.by in ("difficulty", "distance")
            and f.task not in ("text-classification", "multi-label", "token-classification")
        ),
        "sampling.by {s.sampling.by}: expected text-classification, multi-label or token-classification, found "
        "{f.task}: rows are compared by the teacher's probabilities of classes",
        ("task",),
    ),
    Rule(
        lambda s, f: (s.sampling.by == "length" or s.augment.ratio) and f.task in (*LANGUAGE, "question-answering"),
        "sampling.by {s.sampling.by}, augment.ratio {s.augment.ratio:g}: expected a task with a row for each text, "
        "found {f.task}",
        ("task",),
    ),
    Rule(
        lambda s, f: (
            s.sampling.by in ("difficulty", "distance") and (s.teacher.signals != "cached" or not s.loss.computes("kl"))
        ),
        "sampling.by {s.sampling.by}: expected cached signals and a kl term, found teacher.signals "
        "{s.teacher.signals} and loss.kl {s.loss.kl:g}: the teacher's answers are read from the cache",
    ),
    Rule(
        lambda s, f: s.sampling.by == "distance" and is_on_several(f),
        "sampling.by distance: expected one process, found {f.student_processes}: each would measure the distances "
        "of all rows",
        ("student_layout",),
    ),
    # A window of backward passes
    Rule(
        lambda s, f: s.general.train.backward_window,
        "general.train.backward_window: expected 0, found {s.general.train.backward_window}: tokens of an encoder read "
        "later ones",
    ),
    Rule(
        lambda s, f: s.train.backward_window and s.loss.computes(*LAYER_TERMS),
        "train.backward_window {s.train.backward_window}: expected kl and ce alone, found loss.hidden "
        "{s.loss.hidden:g}, attention {s.loss.attention:g}, relations {s.loss.relations:g}: terms on layers compare "
        "whole documents",
    ),
    Rule(
        lambda s, f: s.train.backward_window and s.loss.balance,
        "train.backward_window {s.train.backward_window}: expected loss.balance 0, found {s.loss.balance}: the "
        "gradient of a term is known after its last chunk only",
    ),
    Rule(
        lambda s, f: s.train.backward_window and s.on_policy.share,
        "train.backward_window {s.train.backward_window}: expected on_policy.share 0, found {s.on_policy.share:g}: "
        "generated sequences are trained whole",
    ),
    Rule(
        lambda s, f: s.train.backward_window and s.budget.requested,
        "train.backward_window {s.train.backward_window}: expected no target speed: importance scores and trials of "
        "pruning read whole documents",
    ),
    Rule(
        lambda s, f: s.train.backward_window and s.quantize.scheme,
        "train.backward_window {s.train.backward_window}: expected no quantize.scheme, found {s.quantize.scheme}: "
        "chunks would be rounded otherwise than whole documents; quantize the trained student with pipelines.quantize",
    ),
    *(
        Rule(
            lambda s, f, name=name: (
                trainings_of(s)[name].backward_window and trainings_of(s)[name].schedule == "find"  # type: ignore[misc]
            ),
            f"{name}.backward_window: expected another schedule than find: its range test trains whole documents",
        )
        for name in ("train", "teacher_train")
    ),
    *(
        Rule(
            lambda s, f, name=name: trainings_of(s)[name].backward_window and f.task not in WRITING,  # type: ignore[misc]
            f"{name}.backward_window: expected causal-lm or chat, found {{f.task}}: only a decoder's chunks have "
            "losses of their own",
            ("task",),
        )
        for name in ("train", "teacher_train")
    ),
    Check(check_window_rows, ("task",)),
    Check(check_window_layers, ("task", "teacher")),
    # Settings and task
    Rule(
        lambda s, f: s.on_policy.share and f.task not in WRITING,
        "on_policy.share {s.on_policy.share:g}: expected causal-lm or chat, found {f.task}: the student can't generate "
        "text",
        ("task",),
    ),
    Rule(
        lambda s, f: s.on_policy.share and s.teacher.signals != "online",
        "on_policy.share {s.on_policy.share:g}: expected teacher.signals online, found cached: a cache has no signals "
        "for sequences that the student generates later",
        ("task",),
    ),
    Rule(
        lambda s, f: s.sequences.share and f.task != "chat",
        "sequences.share {s.sequences.share:g}: expected chat, found {f.task}: there are no answers that the teacher "
        "could generate",
        ("task",),
    ),
    Rule(
        lambda s, f: is_head_of_another_task(f),
        "--task {f.task}: the teacher {f.teacher.name!r} was trained for {f.teacher.task}: its outputs have another "
        "meaning",
        ("task", "teacher"),
    ),
    Check(check_task_packing, ("task",)),
    Check(check_ignored_keep, ("task",)),
    Rule(
        lambda s, f: s.general.data and f.task in ("sentence-embedding", *LANGUAGE),
        "general.data: expected a task with labels after the plain text, found {f.task}",
        ("task",),
    ),
    Rule(
        lambda s, f: f.task == "sentence-embedding" and s.teacher.finetune == "always",
        "teacher.finetune always: expected auto or never for sentence-embedding, which has no labels",
        ("task",),
    ),
    Rule(
        lambda s, f: s.teacher.also and f.task != "text-classification",
        "teacher.also: expected text-classification with one class per text, found {f.task}: predictions of several "
        "teachers can only be mixed there",
        ("task",),
    ),
    Rule(
        lambda s, f: f.task == "sentence-embedding" and not s.loss.uses_vectors,
        "loss: expected loss.embedding or loss.similarity, and no kl or ce, for sentence-embedding, found {s.loss}: "
        "there is nothing to compare",
        ("task",),
    ),
    Rule(
        lambda s, f: f.task != "sentence-embedding" and s.loss.uses_vectors,
        "loss: expected kl or ce for {f.task}, found {s.loss}: there is nothing to compare",
        ("task",),
    ),
    Check(check_stored_part, ("task",)),
    # Several teachers
    *(
        Rule(
            lambda s, f, name=name: s.teacher.also and s.loss.computes(name),  # type: ignore[misc]
            f"loss.{name}: expected 0 with several teachers, found {{s.loss.{name}}}: they have no layers in common",
        )
        for name in LAYER_TERMS
    ),
    Rule(
        lambda s, f: s.teacher.also and "temperature" in s.loss.ramps,
        "loss.ramps temperature: expected none with several teachers: they are mixed at one temperature",
    ),
    Rule(
        lambda s, f: s.teacher.also and f.teacher_layout is not None and f.teacher_layout.sharded,
        "teacher.layout {f.teacher_layout}: expected replicated with several teachers: each process queries all of "
        "them",
        ("teacher_layout",),
    ),
    # A student with its own tokenizer
    across_rule("teacher.signals", "online", lambda s: s.teacher.signals != "online"),
    across_rule(
        "loss",
        "kl and ce",
        lambda s: s.loss.computes(*LAYER_TERMS) or s.loss.divergence != LossConfig().divergence,
    ),
    across_rule("machine.devices", "1", lambda s: s.machine.devices > 1),
    across_rule("teacher.ranks", "0", lambda s: s.teacher.ranks > 0),
    across_rule("on_policy.share", "0", lambda s: s.on_policy.share > 0),
    across_rule("train.backward_window", "0", lambda s: s.train.backward_window > 0),
    across_rule("train.batch_tokens", "0", lambda s: s.train.batch_tokens > 0),
    across_rule("data.packing", "auto", lambda s: s.data.packing not in ("auto", "stream")),
    Rule(
        lambda s, f: (
            f.own_tokenizer
            and (
                s.loss.resolved_temperature != default_loss(f.task or "").resolved_temperature
                or "temperature" in s.loss.ramps
            )
        ),
        "loss.temperature: expected none for a student with its own tokenizer, found one: there across.temperature "
        "softens both distributions, and this one has no effect",
        ("own_tokenizer", "task"),
    ),
    Rule(
        lambda s, f: f.own_tokenizer and s.across.kind == "sorted" and not s.loss.computes("ce"),
        "across.kind sorted: expected loss.ce above 0, found 0: sorted distributions show how confident the teacher "
        "is, and not in which token",
        ("own_tokenizer",),
    ),
    # Models, layouts and precision
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
            and (f.student_layout.processes == 1 or f.student_layout.sharded or f.student_layout.zero == 2)
        ),
        "data.rank_speeds {s.machine.rank_speeds}: expected replicas (student.layout replicated or zero1), found "
        "{f.student_layout}: processes that share weights compute together, the fastest no earlier than the slowest",
        ("student_layout",),
    ),
    Check(check_rank_speeds, ("student_layout",)),
    Rule(
        lambda s, f: (
            s.machine.compress != "none"
            and f.student_layout is not None
            and (f.student_layout.sharded or f.student_layout.zero == 2)
        ),
        "machine.compress {s.machine.compress}: expected student.layout replicated or zero1, found "
        "{f.student_layout}: only replicas exchange whole gradients; leave one of the two out",
        ("student_layout",),
    ),
    Rule(
        lambda s, f: s.student.stages == "time" and f.student_layout is not None and f.student_layout.pp == 1,
        "student.stages time: expected a student.layout with pipeline stages, such as pp=2, found {f.student_layout}: "
        "there is nothing to divide; leave it out",
        ("student_layout",),
    ),
    Rule(
        lambda s, f: s.machine.compress != "none" and s.machine.deepspeed,
        "machine.compress {s.machine.compress}: expected no machine.strategy, found {s.machine.strategy}, which "
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
        "student norm=batchnorm: expected one process, found {f.student_processes}: each would normalise by the "
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
        lambda s, f: s.general.data and s.general.progressive and is_on_several(f),
        "general.progressive: expected one process, found {f.student_processes}: layers that aren't "
        "trained have no gradients to send",
        ("student_layout",),
    ),
    Rule(
        lambda s, f: s.loss.balance and is_sharded(f),
        "loss.balance: expected a student whose weights are whole on each process, found {f.student_layout} "
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
            lambda s, f, layout=layout: (  # type: ignore[misc]
                f.precision == "16-mixed"
                and getattr(f, layout).pp > 1
                and (layout == "student_layout" or s.teacher.finetune != "never")
            ),
            f"machine.precision 16-mixed: expected a {who} without pipeline stages, found {{f.{layout}}}: stages run "
            f"the backward pass of losses that aren't scaled; use bf16-mixed, fsdp or tp{hint}",
            ("precision", layout),
        )
        for who, layout, hint in (
            ("student", "student_layout", ""),
            ("teacher that may be fine-tuned", "tuned_layout", ", or teacher.finetune never"),
        )
    ),
    Rule(
        lambda s, f: f.precision == "16-mixed" and s.machine.deepspeed,
        "machine.precision 16-mixed: expected 32 or bf16-mixed with machine.strategy {s.machine.deepspeed}: "
        "DeepSpeed's own loss scaling is untested; use bf16-mixed, or student.layout zero1, zero2 or fsdp=N",
        ("precision",),
    ),
    Rule(
        lambda s, f: f.precision == "16-mixed" and s.machine.compress == "powersgd",
        "machine.compress powersgd: expected precision 32 or bf16-mixed, found 16-mixed: an overflow would stay in "
        "what powersgd carries over to the next step; use fp16 or bf16",
        ("precision",),
    ),
    Check(check_optimizer_packages),
    *(
        Check(partial(check_training_layout, name), (layout,))
        for name, layout in (
            ("train", "student_layout"),
            ("general.train", "student_layout"),
            ("teacher_train", "tuned_layout"),
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
        lambda s, f: s.budget.requested and s.prune.schedule == "gradual" and f.precision == "16-mixed",
        "prune.schedule gradual: expected precision 32 or bf16-mixed, found 16-mixed: gradients whose loss scale "
        "changes from step to step can't be summed into scores",
        ("precision",),
    ),
)
