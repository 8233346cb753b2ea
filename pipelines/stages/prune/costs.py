"""The stage that measures what heads, neurons and layers cost in the runtime of the budget."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from compress.measure.latency import Latency
from compress.prune.budget import Budget
from compress.prune.search.candidates import get_sizes, make_first_units_shape
from compress.prune.search.cost import CostModel, ModelSizes, fit_costs, plan_measurements
from distill.checkpoint.custom_models import head_width, load_model_folder
from distill.slicing import prune
from pipelines.reports.pruning_summary import COSTS
from pipelines.runs.files import write_json
from pipelines.runs.manifest import SCRATCH, JsonObject
from pipelines.runs.stage import Artefact, Run
from pipelines.settings.commands.distill import DistillConfig
from pipelines.settings.this_machine import describe_machine
from pipelines.stages.prepare.data import read_data, read_task
from pipelines.stages.prepare.teacher import MODEL
from pipelines.stages.prepare.vocabulary import load_student_tokenizer
from pipelines.stages.prune.budget_timing import TimedModel, draw_texts, time_together
from pipelines.stages.prune.deployed_models import build_timed_student, build_timed_teacher, rounding_key
from pipelines.stages.prune.start import find_prunable_axes

VERSION = 6  # of the algorithm; bump it when the same inputs give a different result (docs/stages.md)


def costs_stage(run: Run, config: DistillConfig, data: Artefact, teacher: Artefact, start: Artefact) -> Artefact:
    """Fits the costs of heads, neurons and layers to measurements in the budget's runtime.

    The teacher and about a dozen sizes of the start model are measured.
    """
    settings = {
        "budget": config.budget.timing_settings(),
        "max_length": config.data.max_length,
        "machine": describe_machine(),
        "scheme": rounding_key(config),
    } | ({"uniform": True} if config.budget.uniform else {})

    def work(folder: Path) -> JsonObject:
        all_sizes, models = build_measured_models(run, config, data, teacher, start, folder / SCRATCH / "exports")
        lengths = [measure_length(run, config.budget, length, all_sizes, models) for length in config.budget.lengths]
        rows = [asdict(sizes) | {"bytes": models[str(i)].bytes} for i, sizes in enumerate(all_sizes)]
        write_json(folder / COSTS, {"lengths": lengths, "sizes": rows})
        teacher_ms = {str(each["length"]): each["teacher"]["best_ms"] for each in lengths}
        return {"teacher_ms": teacher_ms, "error": max(each["costs"]["error"] for each in lengths)}

    return run.stage("costs", settings, {"data": data, "teacher": teacher, "start": start}, work, version=VERSION)


def measure_length(
    run: Run, budget: Budget, length: int, all_sizes: Sequence[ModelSizes], models: Mapping[str, TimedModel]
) -> JsonObject:
    """Returns the teacher's latency on texts of a length (0: of their own lengths), those of all sizes, and costs."""
    label = f"costs: timing {len(models)} models" + (f" on {length} tokens" if length else "")
    latencies = time_together(models, budget, length, budget.rounds, run.console, label)
    measured = [latencies[str(number)] for number in range(len(all_sizes))]
    costs = fit_costs(all_sizes, [each.best_ms for each in measured])
    run.console.say(
        f"  costs: teacher {latencies['teacher'].best_ms:.3f} ms{f' on {length} tokens' if length else ''}; "
        f"{len(all_sizes)} sizes measured, the sum of parts is off by {100 * costs.error:.1f} % (median)"
    )
    return {
        "length": length,
        "teacher": asdict(latencies["teacher"]),
        "costs": asdict(costs),
        "measured": [build_cost_row(*pair) for pair in zip(all_sizes, measured, strict=True)],
    }


def build_measured_models(
    run: Run, config: DistillConfig, data: Artefact, teacher: Artefact, start: Artefact, scratch: Path
) -> tuple[list[ModelSizes], dict[str, TimedModel]]:
    """Returns the sizes to measure, and the timed models by name: the teacher, and those of the sizes by index."""
    model, tokenizer = load_model_folder(start.folder / MODEL), load_student_tokenizer(start.folder / MODEL)
    task = read_task(data)
    axes = find_prunable_axes(model, task)
    texts = draw_texts(read_data(data).validation, config.budget, config.data.max_length, run.seed, task)
    all_sizes = plan_measurements(get_sizes(axes), step=head_width(model.config), uniform=config.budget.uniform)
    models = {}
    with run.console.track("costs: exporting sizes to measure", len(all_sizes) + 1, "models") as advance:
        models["teacher"] = build_timed_teacher(teacher.folder / MODEL, scratch / "teacher", texts)
        advance(1)
        for number, sizes in enumerate(all_sizes):
            small = prune(model, axes, make_first_units_shape(axes, sizes))
            models[str(number)] = build_timed_student(small, tokenizer, config, scratch / str(number), texts)
            advance(1)
    return all_sizes, models


def build_cost_row(sizes: ModelSizes, latency: Latency) -> JsonObject:
    """Returns measured sizes as `costs.json` stores them."""
    return asdict(sizes) | {"best_ms": latency.best_ms, "p90_ms": latency.p90_ms}


def fit_size_model(costs: Artefact) -> CostModel:
    """Returns a cost model of file sizes in bytes, with the terms of the latency model, fitted to the same models."""
    rows = json.loads((costs.folder / COSTS).read_text())["sizes"]
    all_sizes = [ModelSizes.from_dict(row) for row in rows]
    return fit_costs(all_sizes, [row["bytes"] for row in rows])
