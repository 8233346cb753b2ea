"""The effects of a pruning run's stages on every student, read from the stages' metrics and files."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, cast

from compress.prune.search.cost import CostModel
from compress.quantize.schemes import resolve_scheme
from pipelines.reports.schema import (
    PrunedStudent,
    PruningSummary,
    QuantizedScores,
    SizesEntry,
    TimingConditions,
)
from pipelines.runs.manifest import JsonObject
from pipelines.runs.stage import Artefact

COSTS = "costs.json"
UNREACHED = "unreached"  # metric of a shape stage of a frontier: why it has no shape


def read_pruning(stages: Sequence[Artefact]) -> PruningSummary | None:
    """Returns the report's facts on pruning from the stages' metrics and files; None if no student was pruned."""
    by_name = {stage.name: stage for stage in stages}
    targets = [
        name.removeprefix("shape-")
        for name, stage in by_name.items()
        if name.startswith("shape-") and "budget" in stage.manifest["config"]  # rounds of iterative pruning have none
    ]
    if not targets:
        return None
    reached = [target for target in targets if UNREACHED not in by_name[f"shape-{target}"].metrics]
    start, teacher = by_name["start"], by_name["teacher"]
    budget = by_name[f"shape-{targets[0]}"].manifest["config"]["budget"]
    conditions = {name: budget[name] for name in ("runtime", "precision", "batch", "length", "threads")}
    return {
        "conditions": cast(TimingConditions, conditions),
        "teacher": {"tokens": _read_json(teacher.folder / "model/config.json")["vocab_size"]},
        "start": {
            "tokens": start.metrics["tokens"],
            "params": start.metrics["params"],
            "student": start.manifest["config"]["student"],
            "sizes": read_sizes(by_name["scores"]),
        },
        "students": [read_pruned_student(by_name, target, len(targets)) for target in reached],
    }


def read_sizes(scores: Artefact) -> SizesEntry:
    """Returns the sizes of the model before pruning, read from its scores, which cover every unit."""
    from safetensors import safe_open

    with safe_open(scores.folder / "scores.safetensors", framework="np") as file:
        counts = {name: file.get_slice(name).get_shape()[0] for name in file.keys()}  # noqa: SIM118 - no mapping
    layers = range(counts["layers"])
    return {
        "hidden": counts.get("values.hidden"),
        "heads": [counts.get(f"values.layers.{layer}.heads", 1) for layer in layers],
        "ffn": [counts.get(f"values.layers.{layer}.ffn", 1) for layer in layers],
    }


def read_pruned_student(stages: Mapping[str, Artefact], target: str, targets: int) -> PrunedStudent:
    """Returns the facts on a target's student."""
    from compress.prune.search.cost import ModelSizes

    shape, trained = stages[f"shape-{target}"], stages[f"distill-{target}"]
    chosen = _read_json(shape.folder / "shape.json")
    stored = chosen["sizes"]
    sizes = ModelSizes.from_dict(stored)
    predicted = [(each.costs.predict(sizes), each.teacher_ms) for each in read_costs(stages["costs"])]
    return {
        "name": student_name(target, targets),
        "target": shape.manifest["config"]["target"],
        "sizes": stored,
        "predicted_ms": max(milliseconds for milliseconds, _ in predicted),
        "predicted_speedup": min(teacher / milliseconds for milliseconds, teacher in predicted),
        "measurements": chosen["measurements"],
        "trials": chosen["trials"],
        "teacher_score": shape.metrics.get("teacher_score"),
        "score": trained.metrics["val/score"],
        "quantized": read_quantized(stages.get(f"quantize-{target}")),
        "params": trained.metrics["params"],
    }


def read_quantized(stage: Artefact | None) -> QuantizedScores | None:
    """Returns a student's validation scores when quantized; None if it wasn't."""
    if stage is None:
        return None
    scheme = resolve_scheme(stage.manifest["config"]["quantize"]["scheme"])
    return {
        "precision": scheme.precision,
        "calibrated": stage.metrics["val/calibrated"],
        "score": stage.metrics["val/score"],
    }


def student_name(target: str, targets: int) -> str:
    """Returns a target's student name, used in reports and for its folder; that of a single target needs no suffix."""
    return "student" if targets == 1 else f"student-{target}"


def find_code(folder: Path) -> str | None:
    """Returns the name of the file with a checkpoint's modelling code; None if a stock class loads it."""
    file = folder / "config.json"
    classes = _read_json(file).get("auto_map", {}) if file.is_file() else {}
    return f"{next(iter(classes.values())).split('.')[0]}.py" if classes else None


class LengthCosts(NamedTuple):
    """The fitted costs for texts of a length (0: of their own lengths), and the teacher's milliseconds."""

    length: int
    costs: CostModel
    teacher_ms: float


def read_costs(costs: Artefact) -> list[LengthCosts]:
    """Returns the fitted costs of each length of the budget."""

    def read_fitted(fitted: JsonObject) -> CostModel:
        return CostModel(tuple(fitted["coefficients"]), fitted["error"])

    lengths = _read_json(costs.folder / COSTS)["lengths"]
    return [LengthCosts(each["length"], read_fitted(each["costs"]), each["teacher"]["best_ms"]) for each in lengths]


def _read_json(file: Path) -> JsonObject:
    return cast(JsonObject, json.loads(file.read_text()))
