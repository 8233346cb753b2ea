"""What is refused of a student without attention: static, cnn and gru."""

from collections.abc import Iterator

from compress.export.common.targets import FORMATS, formats_of
from distill.checkpoint.checkpoint import Checkpoint
from distill.errors import InputError
from distill.losses.config import LAYER_TERMS
from distill.student.spec import is_relative, parse_spec
from pipelines.settings.distill_config import DistillConfig
from pipelines.settings.facts import Facts

MODEL_TYPE = "token_vectors"  # of checkpoints of such students
CLASSIFYING = ("text-classification", "multi-label", "regression")
VECTOR_TASKS = {"static": CLASSIFYING, **dict.fromkeys(("cnn", "gru"), (*CLASSIFYING, "token-classification"))}


def check_vector_student(f: Facts) -> None:
    """Checks the settings of a run whose student has no attention.

    Raises:
        InputError: A setting can't be used with it.
    """
    kind = find_kind(f)
    if not kind:
        check_formats_with_attention(f)
        return
    for name, found, expected in list_vector_conflicts(f.settings):
        raise InputError(f"{name}: expected {expected} for a {kind} student, found {found}")
    if f.task is not None and f.task not in VECTOR_TASKS[kind]:
        others = [other for other, tasks in VECTOR_TASKS.items() if f.task in tasks]
        take = " or ".join(others) or "a student with attention, such as layers=2"
        raise InputError(f"student {kind}: expected {', '.join(VECTOR_TASKS[kind])}, found {f.task}; take {take}")
    layout = f.student_layout
    if layout is not None and layout.sharded:
        raise InputError(f"student.layout {layout}: expected replicated for a {kind} student, which has no layers")


def check_formats_with_attention(f: Facts) -> None:
    """Checks that the files to export can hold a student with attention.

    Raises:
        InputError: A format holds only students without.
    """
    for name in formats_of(f.settings.export):
        if not FORMATS[name].attention and (f.is_student_built or f.student is not None):
            raise InputError(
                f"export {name}: expected student {' or '.join(VECTOR_TASKS)}, found {f.settings.student.spec!r}: no "
                f"{name} file can hold a model with attention; onnxruntime's can"
            )


def find_kind(f: Facts) -> str:
    """Returns static, cnn or gru, if the student or a model that is to be compressed is one; otherwise empty."""
    spec = f.settings.student.spec
    if is_relative(spec) and parse_spec(spec).is_vectors:
        return parse_spec(spec).preset
    models: list[Checkpoint] = [each for each in (f.student, f.teacher) if each is not None]
    found = (str(each.description.get("encoder")) for each in models if each.model_type == MODEL_TYPE)
    return next((kind for kind in found if kind in VECTOR_TASKS), "")


def list_vector_conflicts(s: DistillConfig) -> Iterator[tuple[str, object, str]]:
    """Yields (setting, what was found, what is expected) for each setting that such a student can't be used with."""
    layer_terms = [term for term in LAYER_TERMS if s.loss.computes(term)]
    yield from (
        (name, found, expected)
        for name, found, expected, is_refused in (
            ("budget", "a target speed", "none", s.budget.requested),
            ("quantize.scheme", s.quantize.scheme, "none", s.quantize.scheme),
            ("sparsity.pattern", s.sparsity.pattern, "none", s.sparsity.requested),
            ("general.data", s.general.data, "none", s.general.data),
            ("loss", ", ".join(layer_terms), "terms on its outputs", layer_terms),
            ("train.checkpointing", s.train.checkpointing, "none", s.train.checkpointing not in ("none", "auto")),
        )
        if is_refused
    )
