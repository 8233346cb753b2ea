"""Invalid combinations of settings with a student without attention: static, cnn and gru."""

from collections.abc import Iterator
from typing import TypeGuard

from compress.export.common.targets import FORMATS, parse_formats
from distill.checkpoint.checkpoint import Checkpoint
from distill.errors import InputError
from distill.losses.config import LAYER_TERMS
from distill.student.spec import DEFAULT_POOLING, is_attention_free, parse_spec
from distill.tasks.names import ATTENTION_FREE_TASKS
from pipelines.settings.attention_free_names import name_attention_free_students
from pipelines.settings.commands.distill import DistillConfig
from pipelines.settings.facts import Facts

MODEL_TYPE = "token_vectors"  # of checkpoints of such students


def check_attention_free_student(f: Facts) -> None:
    """Checks the settings of a run whose student has no attention.

    Raises:
        InputError: A setting can't be used with it.
    """
    kind = find_kind(f)
    if not kind:
        check_formats_with_attention(f)
        return
    for name, found, expected in list_attention_free_conflicts(f.settings):
        raise InputError(f"{name}: expected {expected} for a {kind} student, found {found}")
    if f.task is not None and f.task not in ATTENTION_FREE_TASKS[kind]:
        others = [other for other, tasks in ATTENTION_FREE_TASKS.items() if f.task in tasks]
        take = " or ".join(others) or "a student with attention, such as layers=2"
        raise InputError(
            f"student {kind}: expected {', '.join(ATTENTION_FREE_TASKS[kind])}, found {f.task}; take {take}"
        )
    check_attention_free_formats(f, kind)
    layout = f.student_layout
    if layout is not None and layout.sharded:
        raise InputError(f"student.layout {layout}: expected replicated for a {kind} student, which has no layers")


def check_attention_free_beside(f: Facts) -> None:
    """Checks the students without attention that are to be trained beside pruned ones, and the frontier that has them.

    Raises:
        InputError: A spec isn't one, can't do the task, or is listed twice; there is no speed-up; or a setting can't be
            used with them.
    """
    s = f.settings
    if not (s.student.attention_free or s.budget.frontier):
        return
    setting = "budget.frontier" if s.budget.frontier else "student.attention_free"
    if not s.budget.speedup or s.student.trained:
        raise InputError(f"{setting}: expected --speedup such as 4,10,100 with it, found none")
    layout = f.student_layout
    for name, found, expected, is_rejected in (
        ("quantize.scheme", s.quantize.scheme, "none (int8 is the budget's precision)", s.quantize.scheme),
        ("sparsity.pattern", s.sparsity.pattern, "none", s.sparsity.requested),
        ("prune.schedule", s.prune.schedule, "oneshot", s.prune.schedule != "oneshot"),
        ("prune.nested", True, "false", s.prune.nested),
        ("machine.strategy", s.machine.asynchronous, "none", s.machine.asynchronous),
        ("student.layout", layout, "replicated", layout is not None and layout.sharded),
        ("budget.min_score_share", s.budget.min_score_share, "0", s.budget.min_score_share),
    ):
        if is_rejected:
            raise InputError(f"{name}: expected {expected} with {setting}, found {found}")
    for spec in name_attention_free_students(s.student).values():
        if not is_attention_free(spec):
            raise InputError(
                f"student.attention_free: expected specs of {', '.join(ATTENTION_FREE_TASKS)}, found {spec!r}"
            )
        kind = parse_spec(spec).preset
        if f.task is not None and f.task not in ATTENTION_FREE_TASKS[kind]:
            raise InputError(
                f"student.attention_free {spec}: expected {', '.join(ATTENTION_FREE_TASKS[kind])}, found {f.task}"
            )


def check_formats_with_attention(f: Facts) -> None:
    """Checks that the files to export can hold a student with attention.

    Raises:
        InputError: A format holds only students without.
    """
    for name in parse_formats(f.settings.export):
        if not FORMATS[name].attention and (f.is_student_built or f.student is not None):
            expected = "static" if FORMATS[name].reads_texts else " or ".join(ATTENTION_FREE_TASKS)
            raise InputError(
                f"export {name}: expected student {expected}, found {f.settings.student.spec!r}: no {name} file can "
                "hold a model with attention; onnxruntime's can"
            )


def check_attention_free_formats(f: Facts, kind: str) -> None:
    """Checks that the files to export can hold the student.

    Raises:
        InputError: A library of static vectors computes only weighted means of tokens; or a runtime can't hash pairs.
    """
    pooling, ngrams = describe_pooling(f, kind)
    found = f"{kind}, pooling={'+'.join(pooling)}" + f", ngrams={ngrams}" * bool(ngrams)
    for name in parse_formats(f.settings.export):
        if FORMATS[name].reads_texts and (kind, pooling, ngrams) != ("static", ("weighted",), 0):
            raise InputError(
                f"export {name}: expected student static, pooling=weighted and no ngrams, found {found}: a mean of "
                "vectors of tokens would be another vector; numpy's files hold it"
            )
        if name == "openvino" and ngrams:
            raise InputError(
                f"export openvino: expected a student without ngrams, found {found}: OpenVINO hashes pairs in 32-bit "
                "floats, and so finds other rows; onnxruntime's files hold it"
            )


def describe_pooling(f: Facts, kind: str) -> tuple[tuple[str, ...], int]:
    """Returns the kinds of pooling and the number of hashed pairs of the student or of the model to compress."""
    spec = f.settings.student.spec
    if is_attention_free(spec):
        parsed = parse_spec(spec)
        return parsed.pooling or DEFAULT_POOLING[kind], parsed.requested.get("ngrams", (0,))[0]
    description = next(each.description for each in (f.student, f.teacher) if is_attention_free_checkpoint(each))
    return tuple(description.get("pooling", ())), int(description.get("ngram_buckets", 0))


def is_attention_free_checkpoint(checkpoint: Checkpoint | None) -> TypeGuard[Checkpoint]:
    """Returns whether a checkpoint is of a student without attention."""
    return checkpoint is not None and checkpoint.model_type == MODEL_TYPE


def find_kind(f: Facts) -> str:
    """Returns static, cnn or gru, if the student or a model that is to be compressed is one; otherwise empty."""
    spec = f.settings.student.spec
    if is_attention_free(spec):
        return parse_spec(spec).preset
    kinds = (
        str(each.description.get("encoder")) for each in (f.student, f.teacher) if is_attention_free_checkpoint(each)
    )
    return next((kind for kind in kinds if kind in ATTENTION_FREE_TASKS), "")


def list_attention_free_conflicts(s: DistillConfig) -> Iterator[tuple[str, object, str]]:
    """Yields (setting, what was found, what is expected) for each setting that such a student can't be used with."""
    layer_terms = [term for term in LAYER_TERMS if s.loss.computes(term)]
    yield from (
        (name, found, expected)
        for name, found, expected, is_rejected in (
            ("budget", "a target speed", "none", s.budget.requested),
            ("sparsity.pattern", s.sparsity.pattern, "none", s.sparsity.requested),
            ("general.data", s.general.data, "none", s.general.data),
            ("loss", ", ".join(layer_terms), "terms on its outputs", layer_terms),
            ("train.checkpointing", s.train.checkpointing, "none", s.train.checkpointing not in ("none", "auto")),
        )
        if is_rejected
    )
