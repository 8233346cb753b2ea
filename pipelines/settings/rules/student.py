"""Invalid combinations of settings of a student, its pruning, quantization and export formats."""

from dataclasses import fields

from compress.export.common.targets import by_scheme, check_float, check_installed, parse_formats
from compress.prune.budget import Budget
from compress.prune.config import PruneConfig
from distill.errors import InputError
from distill.student.norms import check_family_kind
from distill.student.spec import check_spec, parse_spec, read_norm
from pipelines.settings.commands.distill import DistillConfig
from pipelines.settings.facts import Facts
from pipelines.settings.hardware_checks import check_machine
from pipelines.settings.rules.attention_free import check_attention_free_beside, check_attention_free_student
from pipelines.settings.rules.conditions import has_batchnorm
from pipelines.settings.rules.nested import check_nested
from pipelines.settings.rules.rule import Check, Rule
from pipelines.settings.schemes import check_processor

ANY_DEPTH = ("uniform", "last", "dynamic", "learned")  # layer maps of students with any number of layers


def lacks_cached_logits(s: DistillConfig) -> bool:
    """Returns whether the loss needs cached logits that the run has no stage for."""
    return not ((s.loss.computes("kl") or s.loss.uses_vectors) and not s.teacher.online)


def check_norms(facts: Facts) -> None:
    """Checks that a student of the teacher's family can have the requested normalization.

    Raises:
        InputError: It can't.
    """
    spec = facts.settings.student.spec
    assert facts.teacher is not None
    norm = read_norm(spec)
    if norm and not parse_spec(spec).is_bottleneck:
        check_family_kind(norm, facts.teacher.model_type)


def has_other_norms(f: Facts) -> bool:
    """Returns whether the model to prune has norms of another kind than its stock class."""
    return any("norms" in each.description for each in (f.teacher, f.student) if each is not None)


def check_formats(f: Facts) -> None:
    """Checks that the formats to export suit the task and are installed."""
    formats = parse_formats(f.settings.export)
    if f.settings.quantize.scheme:
        by_scheme(formats, f.settings.quantize.scheme)
    else:
        check_float(formats, "a student without --quantize")
    check_installed(formats)


def check_ignored_pruning(f: Facts) -> None:
    """Checks that no setting of the budget or of pruning is set that has no effect without a target speed."""
    settings = f.settings
    if settings.budget.requested:
        return
    allowed = ("min_score_share",) if settings.quantize.scheme else ()
    groups = (("budget", settings.budget.resolve(), Budget().resolve()), ("prune", settings.prune, PruneConfig()))
    for group, given, plain in groups:
        for each in fields(given):
            found = getattr(given, each.name)
            if found != getattr(plain, each.name) and each.name not in allowed:
                raise InputError(
                    f"{group}.{each.name}: expected a speedup, latency_ms or texts_per_second with it, found "
                    f"{found} alone: nothing is pruned without one"
                )


STUDENT_RULES: tuple[Rule | Check, ...] = (
    Check(lambda f: check_spec(f.settings.student.spec)),
    Rule(
        lambda s, f: s.budget.requested and s.student.trained,
        "budget: expected none with student.trained, found a target speed: a trained student is quantized as it is; "
        "pipelines.prune and pipelines.distill prune and quantize",
    ),
    Check(check_ignored_pruning),
    Check(check_attention_free_student),
    Check(check_attention_free_beside),
    Check(check_nested),
    Rule(
        lambda s, f: s.budget.requested and read_norm(s.student.spec),
        "student {s.student.spec!r}: expected no norm= with a budget, found one: a student with other normalizations "
        "can't be pruned; build it smaller",
    ),
    Rule(
        lambda s, f: s.budget.requested and has_other_norms(f),
        "budget: expected a model with the normalizations of its stock class, found one with others: it can't be "
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
            s.student.trained
            and ((f.is_student_built and s.student.spec != "teacher") or not (s.quantize.scheme or s.fit_class_biases))
        ),
        "student.trained: expected a checkpoint or teacher, and a quantize.scheme or fit_class_biases, found "
        "{s.student.spec!r} and scheme {s.quantize.scheme!r}: there is nothing to do",
    ),
    Rule(
        lambda s, f: s.budget.requested and lacks_cached_logits(s),
        "budget: a pruned student recovers on the teacher's cached logits, so expected loss.kl above 0 and "
        "teacher.online false, found loss.kl {s.loss.kl:g} and {s.teacher.source} signals",
    ),
    Rule(
        lambda s, f: s.budget.requested and s.loss.computes("attention", "relations"),
        "loss.attention, loss.relations: expected 0 with a budget, found attention {s.loss.attention:g} and relations "
        "{s.loss.relations:g}: pruned layers have other numbers of heads than the teacher's; use loss.hidden",
    ),
    Rule(
        lambda s, f: s.budget.requested and s.loss.computes("hidden") and s.loss.layer_map not in ANY_DEPTH,
        "loss.layer_map {s.loss.layer_map}: expected " + ", ".join(ANY_DEPTH) + " with a budget, found another: the "
        "number of layers of a pruned student isn't known before the search",
    ),
    Rule(
        lambda s, f: s.quantize.scheme and lacks_cached_logits(s),
        "quantize: a quantized student is trained on the teacher's cached logits, so expected loss.kl above 0 and "
        "teacher.online false, found loss.kl {s.loss.kl:g} and {s.teacher.source} signals",
    ),
    Rule(
        lambda s, f: s.budget.requested and s.prune.embedding_rank and s.budget.uniform,
        "prune.embedding_rank: expected 0 with budget.uniform, found {s.prune.embedding_rank}: no stock class has a "
        "factorized token embedding; leave one of the settings out",
    ),
    Rule(
        lambda s, f: s.sparsity.requested and s.train.patience,
        "train.patience {s.train.patience}: expected 0 with sparsity.pattern: the weights with the best score may be "
        "from before the last zeros were set",
    ),
    Rule(
        lambda s, f: s.sparsity.requested and s.train.batch_growth != "none",
        "train.batch_growth {s.train.batch_growth}: expected none with sparsity.pattern, found growing batches: they "
        "take fewer steps than the schedule of the zeros has, so that the last zeros might never be set",
    ),
    Check(check_formats),
    Check(lambda f: check_processor(f.settings)),
    Check(lambda f: check_machine(f.settings.machine.accelerator, f.settings.machine.precision)),
)
