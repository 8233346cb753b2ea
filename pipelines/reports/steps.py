"""The effects of a pruning run's stages on every student, read from the stages' metrics and files."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compress.prune.search.cost import CostModel
from compress.quantize.schemes import scheme_of
from pipelines.runs.stage import Artefact


def read_pruning(stages: Sequence[Artefact]) -> dict[str, Any] | None:
    """Returns the report's facts on pruning from the stages' metrics and files; None if no student was pruned."""
    named = {stage.name: stage for stage in stages}
    targets = [
        name.removeprefix("shape-")
        for name, stage in named.items()
        if name.startswith("shape-") and "budget" in stage.manifest["config"]  # rounds of iterative pruning have none
    ]
    if not targets:
        return None
    start, teacher = named["start"], named["teacher"]
    conditions = named[f"shape-{targets[0]}"].manifest["config"]["budget"]
    return {
        "conditions": {name: conditions[name] for name in ("runtime", "precision", "batch", "length", "threads")},
        "teacher": {"words": json.loads((teacher.folder / "model/config.json").read_text())["vocab_size"]},
        "start": dict(start.metrics) | start.manifest["config"] | {"outline": units_of(named["scores"])},
        "students": [read_pruned_student(named, target, len(targets)) for target in targets],
    }


def units_of(scores: Artefact) -> dict[str, Any]:
    """Returns the outline of the model before pruning, read from its scores, which cover every unit."""
    from safetensors import safe_open

    with safe_open(scores.folder / "scores.safetensors", framework="np") as file:
        counts = {name: file.get_slice(name).get_shape()[0] for name in file.keys()}  # noqa: SIM118
    layers = range(counts["layers"])
    return {"hidden": counts.get("values.hidden")} | {
        kind: [counts.get(f"values.layers.{layer}.{kind}", 1) for layer in layers] for kind in ("heads", "ffn")
    }


def read_pruned_student(named: Mapping[str, Artefact], target: str, students: int) -> dict[str, Any]:
    """Returns the facts on a target's student."""
    from compress.prune.search.cost import Outline

    shape, trained, costs = named[f"shape-{target}"], named[f"distill-{target}"], named["costs"]
    found = json.loads((shape.folder / "shape.json").read_text())
    sizes = found["outline"]
    fitted, teacher_ms = read_costs(costs)
    predicted = fitted.predict(Outline(sizes["hidden"], tuple(sizes["heads"]), tuple(sizes["ffn"])))
    return {
        "name": name_of(target, students),
        "target": shape.manifest["config"]["target"],
        "outline": sizes,
        "predicted_ms": predicted,
        "predicted_speedup": teacher_ms / predicted,
        "measurements": found["measurements"],
        "trials": found["trials"],
        "teacher_score": shape.metrics.get("teacher_score"),
        "score": trained.metrics["val/score"],
        "quantized": quantized_of(named.get(f"quantize-{target}")),
        "params": trained.metrics["params"],
    }


def quantized_of(stage: Artefact | None) -> dict[str, Any] | None:
    """Returns a student's validation scores when quantized; None if it wasn't."""
    if stage is None:
        return None
    scheme = scheme_of(stage.manifest["config"]["quantize"]["scheme"])
    return {
        "precision": scheme.precision,
        "calibrated": stage.metrics["val/calibrated"],
        "score": stage.metrics["val/score"],
    }


def name_of(target: str, students: int) -> str:
    """Returns a target's student name, used in reports and for its folder; a single student needs no suffix."""
    return "student" if students == 1 else f"student-{target}"


def code_of(folder: Path) -> str | None:
    """Returns the name of the file with a checkpoint's modelling code; None if a stock class loads it."""
    file = folder / "config.json"
    mapped = json.loads(file.read_text()).get("auto_map", {}) if file.is_file() else {}
    return f"{next(iter(mapped.values())).split('.')[0]}.py" if mapped else None


COSTS = "costs.json"


def read_costs(costs: Artefact) -> tuple[CostModel, float]:
    """Reads the fitted costs and the teacher's milliseconds."""
    about = json.loads((costs.folder / COSTS).read_text())
    return CostModel(tuple(about["costs"]["coefficients"]), about["costs"]["error"]), about["teacher"]["best_ms"]
