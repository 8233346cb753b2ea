"""The export targets of a run's models."""

from compress.export.common.targets import FLOAT, ExportTarget, parse_formats
from compress.prune.budget import Budget
from compress.quantize.schemes import resolve_scheme
from distill.tasks.names import GENERATIVE_TASKS
from pipelines.settings.commands.distill import DistillConfig
from pipelines.settings.schemes import is_dynamic, list_schemes
from pipelines.stages.deliver.export import ALWAYS, HUGGINGFACE, list_quantized_targets


def list_teacher_targets(config: DistillConfig) -> list[ExportTarget]:
    """Returns the teacher's export targets, for the comparison: the float targets of the students that it can have."""
    return [target for target in list_float_targets(config) if target.kind.attention]


def list_float_targets(config: DistillConfig) -> list[ExportTarget]:
    """Returns the float targets of the students."""
    is_measured = config.budget.requested and config.budget.runtime != "pytorch"
    names = [*parse_formats(config.export), *([config.budget.runtime] if is_measured else [])]
    return list(
        dict.fromkeys((*ALWAYS, *(ExportTarget(name) for name in names if ExportTarget(name).kind.supports_float)))
    )


def list_student_targets(config: DistillConfig, scheme: str = "") -> list[ExportTarget]:
    """Returns a student's export targets: float targets and, if `scheme` is given, the formats that support it.

    Those formats are exported in float too, so that the report shows the gain of quantization on each runtime.
    """
    floats, schemes = list_float_targets(config), list_schemes(config)
    if config.task in GENERATIVE_TASKS and "onnx" in parse_formats(config.export):
        floats.append(ExportTarget("onnx-decoder"))
    if not scheme:
        return [*floats, *([ExportTarget("onnxruntime", "int8")] if is_dynamic(config) else [])]
    names = [*schemes[scheme]]
    if config.task in GENERATIVE_TASKS and {"onnx", "onnxruntime"} & {*names}:
        names.append("onnx-decoder")
    taken = list_quantized_targets(names, resolve_scheme(scheme).precision)
    if scheme != next(iter(schemes)):  # a student in addition to the main one
        floats = [HUGGINGFACE, *(ExportTarget(each.format) for each in taken if each.kind.supports_float)]
    others = {name for each, names in schemes.items() if each != scheme for name in names}
    return [*(each for each in floats if each.format not in others), *taken]


def find_scored_target(config: DistillConfig, scheme: str | None = None) -> ExportTarget | None:
    """Returns the target of a student with a scheme, or of the teacher, whose validation score is compared.

    It is compared with the budget's minimum, or with those of a frontier's other students; otherwise there is none.
    """
    if not (config.budget.requested and (config.budget.min_score_share or config.budget.frontier)):
        return None
    wanted = find_budget_target(config.budget, teacher=scheme is None)
    forms = list_student_targets(config, scheme) if scheme is not None else [wanted]
    return wanted if wanted in forms else forms[-1]


def find_budget_target(budget: Budget, *, teacher: bool = False) -> ExportTarget:
    """Returns the export target of a budget; the teacher's is in fp32."""
    name = {"pytorch": "huggingface"}.get(budget.runtime, budget.runtime)
    return ExportTarget(name, "int8" if budget.precision == "int8" and not teacher else FLOAT)
