"""The stages of a run, in order, from the plan to the published files."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from distill.errors import InputError
from pipelines.settings.distill_config import DistillConfig
from pipelines.settings.plan import Plan, selects_from_cache

if TYPE_CHECKING:
    from compress.export.common.targets import ExportTarget
    from pipelines.runs.stage import Artefact, Run
    from pipelines.stages.students import TrainedStudent

_BLOCKS = 8  # maximum number of blocks for comparing a language model's exports; each has tens of megabytes of logits


def run_stages(run: "Run", plan: Plan) -> tuple[dict[str, "Artefact"], list["TrainedStudent"]]:
    """Runs all stages in order up to the evaluation, or to the last one requested.

    Returns:
        (stage name -> artefact, the students)
    """
    from pipelines.settings.task_settings import run_task_arguments
    from pipelines.stages.cache.ensemble import ensemble_stage
    from pipelines.stages.cache.stage import cache_stage
    from pipelines.stages.cache.teacher_answers import answers_stage
    from pipelines.stages.prepare.augment import augment_stage
    from pipelines.stages.prepare.clean import clean_stage
    from pipelines.stages.prepare.data import data_stage
    from pipelines.stages.prepare.teacher import teacher_stage
    from pipelines.stages.students import train_students
    from pipelines.stages.train.general import general_stage
    from pipelines.stages.train.precision import chosen_precision
    from pipelines.stages.train.select import adapt_loss, select_stage

    settings = plan.settings
    made: dict[str, Artefact] = {}
    if not run.is_sample and (settings.augment.requested or settings.select.requested):
        run.world.compute_once(lambda: check_data_settings(plan, run.seed))
    made["data"] = data_stage(run, settings.data, plan.task, run_task_arguments(settings, plan.task))
    precision = chosen_precision(run, plan, made["data"])
    plan.check_precision(precision)
    if settings.clean.requested:
        made["clean"] = made["data"] = clean_stage(run, plan, made["data"], precision)
    if settings.general.data:
        made["general"] = general_stage(run, plan, precision)
    if settings.until == "general":
        return made, []
    made["teacher"] = teacher_stage(run, plan, plan.teacher, made["data"], precision)
    if settings.until == "teacher":
        return made, []
    if settings.augment.requested:
        made["augment"] = made["data"] = augment_stage(run, plan, made["data"], made["teacher"])
    reads_cache = selects_from_cache(settings)
    if settings.select.requested and not reads_cache:
        made["select"] = made["data"] = select_stage(run, plan, made["data"], made["teacher"], None)
    if settings.sequences.share:
        made["answers"] = answers_stage(run, settings, made["data"], made["teacher"])
        made["data"] = made["answers"]
    if settings.loss.needs_teacher and settings.teacher.signals == "cached":
        source = made["teacher"]
        if settings.teacher.also:
            made["ensemble"] = source = ensemble_stage(run, plan, made["data"], made["teacher"], precision)
        made["cache"] = cache_stage(run, plan, made["data"], source)
    if reads_cache:
        made["select"] = made["data"] = select_stage(run, plan, made["data"], made["teacher"], made["cache"])
    if settings.until == "cache":
        return made, []
    if "select" in made:
        plan = adapt_loss(run, plan, made["select"])
    students, stages = train_students(run, plan, made, precision)
    made |= stages
    if settings.until != "distill":
        made |= export_and_evaluate(run, settings, made, students)
    return made, students


def check_data_settings(plan: Plan, seed: int) -> bool:
    """Checks the settings of augmentation and selection against the data, before any stage; returns True.

    Raises:
        InputError: A file doesn't fit the data, or a class would be left without rows.
    """
    from pipelines.stages.prepare.augment import check_augmentation
    from pipelines.stages.prepare.data import read_splits_of
    from pipelines.stages.train.select import check_selection

    settings = plan.settings
    with TemporaryDirectory(prefix="stillroom-") as scratch:
        splits = read_splits_of(plan.task, settings.data, seed, Path(scratch))
        if settings.augment.requested:
            check_augmentation(settings.augment, splits)
        elif settings.select.requested:
            check_selection(settings.select, splits)
    return True


def export_and_evaluate(
    run: "Run", config: DistillConfig, made: dict[str, "Artefact"], students: Sequence["TrainedStudent"]
) -> dict[str, "Artefact"]:
    """Returns the stages that export the students and evaluate them, by name."""
    from distill.tasks.language import Language
    from pipelines.settings.schemes import is_dynamic_reduced
    from pipelines.stages.deliver.evaluate import EvaluatedModel, evaluate_stage
    from pipelines.stages.deliver.export import export_stage
    from pipelines.stages.prepare.compared_texts import as_plain_texts
    from pipelines.stages.prepare.data import read_data, read_task
    from pipelines.stages.prepare.teacher import MODEL

    waiting = next((each.stage for each in students if each.stage.digest is None), None)
    if waiting is not None:
        for name in ("export-teacher", *(f"export{each.suffix}" for each in students), "evaluate", "report"):
            run.plan_stage(name)
        return {}
    splits, task = read_data(made["data"]), read_task(made["data"])
    exports, candidates = {}, []
    wanted = [("export-teacher", "teacher", made["teacher"], forms_of_teacher(config), scored_target(config))]
    wanted += [
        (
            f"export{each.suffix}",
            each.name,
            each.stage,
            student_targets(config, each.scheme),
            scored_target(config, each),
        )
        for each in students
    ]
    for stage, name, model, targets, judged in wanted:
        exports[stage] = export_stage(
            run,
            stage,
            model,
            model.folder / MODEL,
            as_plain_texts(splits.test),
            parity=min(config.measure.parity, _BLOCKS) if isinstance(task, Language) else config.measure.parity,
            max_length=config.data.max_length,
            targets=targets,
            reduced=is_dynamic_reduced(config),
        )
        candidates.append(EvaluatedModel(name, model.name, exports[stage], judged))
    done = evaluate_stage(run, candidates, splits, made["data"], config.measure, config.data.max_length, task)
    return exports | {"evaluate": done}


def forms_of_teacher(config: DistillConfig) -> list["ExportTarget"]:
    """Returns the teacher's export targets, for the comparison: the float targets of the students that it can have."""
    return [target for target in float_targets(config) if target.kind.attention]


def float_targets(config: DistillConfig) -> list["ExportTarget"]:
    """Returns the float targets of the students."""
    from compress.export.common.targets import ExportTarget, formats_of
    from pipelines.stages.deliver.export import ALWAYS

    is_measured = config.budget.requested and config.budget.runtime != "pytorch"
    names = [*formats_of(config.export), *([config.budget.runtime] if is_measured else [])]
    return list(dict.fromkeys((*ALWAYS, *(ExportTarget(name) for name in names if ExportTarget(name).kind.floats))))


def student_targets(config: DistillConfig, scheme: str = "") -> list["ExportTarget"]:
    """Returns a student's export targets: float targets and, if `scheme` is given, the formats that support it.

    Those formats are exported in float too, so that the report shows the gain of quantization on each runtime.
    """
    from compress.export.common.targets import ExportTarget, formats_of
    from compress.quantize.schemes import resolve_scheme
    from distill.tasks.names import WRITING
    from pipelines.settings.schemes import is_dynamic, schemes_of
    from pipelines.stages.deliver.export import HUGGINGFACE, rounded_targets

    floats, schemes = float_targets(config), schemes_of(config)
    if config.task in WRITING and "onnx" in formats_of(config.export):
        floats.append(ExportTarget("onnx-decoder"))
    if not scheme:
        return [*floats, *([ExportTarget("onnxruntime", "int8")] if is_dynamic(config) else [])]
    taken = rounded_targets(schemes[scheme], resolve_scheme(scheme).precision)
    if scheme != next(iter(schemes)):  # a student in addition to the main one
        floats = [HUGGINGFACE, *(ExportTarget(each.format) for each in taken if each.kind.floats)]
    others = {name for each, names in schemes.items() if each != scheme for name in names}
    return [*(each for each in floats if each.format not in others), *taken]


def run_to_report(run: "Run", plan: Plan) -> None:
    """Runs all stages, then writes the report and prints where the results are."""
    from pipelines.runs.files import write_json
    from pipelines.runs.publication import check_publishable
    from pipelines.stages.deliver.export import check_refused
    from pipelines.stages.deliver.report import REPORT, STUDENT, print_results, publish_results, report_stage
    from pipelines.stages.prepare.data import read_task

    settings = plan.settings
    if run.world.is_rank_zero:
        check_publishable(run.output / STUDENT)
        write_json(run.output / "config.json", asdict(settings))
    made, students = run_stages(run, plan)
    if settings.until != "report":
        rows = [(name, f"{stage.manifest['wall_seconds']:.1f}", str(stage.folder)) for name, stage in made.items()]
        run.console.table("Stages", ("stage", "seconds", "folder"), rows)
        return
    report = report_stage(run, reported_settings(settings), read_task(made["data"]), made["evaluate"])
    exports = {each.name: made[f"export{each.suffix}"] for each in students}
    if run.world.is_rank_zero:
        places = publish_results(run, report, exports, find_preprocessing(made))
        print_results(run.console, json.loads((report.folder / REPORT).read_text()), places)
    check_scores(settings, made["evaluate"])
    check_refused(list(exports.values()))


def find_preprocessing(made: Mapping[str, "Artefact"]) -> Path | None:
    """Returns the file that says how a deployed student's texts are cleaned; None without such cleaning."""
    from distill.data.clean.deployment import PREPROCESSING

    file = made["clean"].folder / PREPROCESSING if "clean" in made else None
    return file if file is not None and file.exists() else None


def scored_target(config: DistillConfig, student: "TrainedStudent | None" = None) -> "ExportTarget | None":
    """Returns the export target of a student, or of the teacher, to which the budget's minimum score applies."""
    from pipelines.stages.prune.budget_timing import target_for

    if not (config.budget.requested and config.budget.min_score):
        return None
    wanted = target_for(config.budget, teacher=student is None)
    forms = student_targets(config, student.scheme) if student is not None else [wanted]
    return wanted if wanted in forms else forms[-1]


def check_scores(config: DistillConfig, evaluation: "Artefact") -> None:
    """Checks that the deployed students preserve the requested share of the teacher's validation score.

    The students' files are retained either way.

    Raises:
        InputError: A student preserves less; the message names all such students.
    """
    from pipelines.reports.targets import deployed_shares

    least = config.budget.min_score
    if not (config.budget.requested and least):
        return
    kept = deployed_shares(json.loads((evaluation.folder / "evaluation.json").read_text()))
    if not kept:
        raise InputError(
            f"budget.min_score {least:g}: expected the teacher's file on {config.budget.runtime} to compare with, "
            "found none that was proven: nothing says what was kept"
        )
    missed = [f"{name} keeps {share:.1%}" for name, share in kept.items() if share < least]
    if missed:
        reached = [f"{name} keeps {share:.1%}" for name, share in kept.items() if share >= least]
        raise InputError(
            f"budget.min_score {least:g}: of the teacher's score on the validation split {', '.join(missed)}. "
            "Everything was written all the same; it would take a lower speed, more epochs or more text "
            "(--data.unlabelled)" + (f"; {reached[-1]}" if reached else "")
        )


def reported_settings(config: DistillConfig) -> dict[str, Any]:
    """Returns the configuration as shown in the report."""
    from pipelines.settings.schemes import resolved_reduced

    settings = {
        name: value for name, value in asdict(config).items() if name not in ("output", "until", "dry_run", "probe")
    }
    return settings | {"quantize": settings["quantize"] | {"reduced": resolved_reduced(config)}}
