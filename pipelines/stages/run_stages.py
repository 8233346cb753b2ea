"""The stages of a run, in order, from the plan to the published files."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from math import isnan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from distill.errors import InputError
from pipelines.settings.commands.distill import DistillConfig
from pipelines.settings.plan import RunPlan, selects_from_cache, stores_signals

if TYPE_CHECKING:
    from pipelines.runs.stage import Artefact, Run
    from pipelines.stages.students import TrainedStudent

NESTED_FOLDER = "nested"


def run_stages(run: "Run", plan: RunPlan) -> tuple[dict[str, "Artefact"], list["TrainedStudent"]]:
    """Runs all stages in order up to the evaluation, or to the last one requested.

    Returns:
        (stage name -> artefact, the students)
    """
    from pipelines.settings.task_settings import run_task_arguments
    from pipelines.stages.cache.ensemble import ensemble_stage
    from pipelines.stages.cache.stage import cache_stage
    from pipelines.stages.cache.teacher_answers import answers_stage
    from pipelines.stages.delivery import deliver_students
    from pipelines.stages.prepare.augment import augment_stage
    from pipelines.stages.prepare.clean import clean_stage
    from pipelines.stages.prepare.data import data_stage
    from pipelines.stages.prepare.pairs import adapt_to_pairs
    from pipelines.stages.prepare.teacher import teacher_stage
    from pipelines.stages.students import train_students
    from pipelines.stages.train.general import general_stage
    from pipelines.stages.train.precision import select_precision
    from pipelines.stages.train.select import adapt_loss, select_stage

    settings = plan.settings
    stages: dict[str, Artefact] = {}
    if not run.is_sample and (settings.augment.requested or settings.select.requested):
        run.world.compute_once(lambda: check_data_settings(plan, run.seed))
    stages["data"] = data_stage(run, settings.data, plan.task, run_task_arguments(settings, plan.task))
    plan = adapt_to_pairs(run, plan, stages["data"])
    settings = plan.settings
    precision = select_precision(run, plan, stages["data"])
    plan.check_precision(precision)
    if settings.clean.requested:
        stages["clean"] = stages["data"] = clean_stage(run, plan, stages["data"], precision)
    if settings.general.data:
        stages["general"] = general_stage(run, plan, precision)
    if settings.until == "general":
        return stages, []
    stages["teacher"] = teacher_stage(run, plan, plan.teacher, stages["data"], precision)
    if settings.until == "teacher":
        return stages, []
    if settings.augment.requested:
        stages["augment"] = stages["data"] = augment_stage(run, plan, stages["data"], stages["teacher"])
    reads_cache = selects_from_cache(settings)
    if settings.select.requested and not reads_cache:
        stages["select"] = stages["data"] = select_stage(run, plan, stages["data"], stages["teacher"], None)
    if settings.sequences.share:
        stages["answers"] = answers_stage(run, settings, stages["data"], stages["teacher"])
        stages["data"] = stages["answers"]
    if stores_signals(settings):
        source = stages["teacher"]
        if settings.teacher.additional:
            stages["ensemble"] = source = ensemble_stage(run, plan, stages["data"], stages["teacher"], precision)
        stages["cache"] = cache_stage(run, plan, stages["data"], source)
    if reads_cache:
        stages["select"] = stages["data"] = select_stage(run, plan, stages["data"], stages["teacher"], stages["cache"])
    if settings.until == "cache":
        return stages, []
    if "select" in stages:
        plan = adapt_loss(run, plan, stages["select"])
    students, added = train_students(run, plan, stages, precision)
    stages |= added
    if settings.until != "distill":
        students, added = deliver_students(run, plan, stages, students, precision)
        stages |= added
    return stages, students


def check_data_settings(plan: RunPlan, seed: int) -> bool:
    """Checks the settings of augmentation, or else those of selection, against the data, before any stage.

    With both, rows are selected among those that augmentation has yet to make.

    Returns:
        True.

    Raises:
        InputError: A file doesn't fit the data, or a class would be left without rows.
    """
    from pipelines.stages.prepare.augment import check_augmentation
    from pipelines.stages.prepare.data import read_task_splits
    from pipelines.stages.train.select import check_selection

    settings = plan.settings
    with TemporaryDirectory(prefix="stillroom-") as scratch:
        splits = read_task_splits(plan.task, settings.data, seed, Path(scratch))
        if settings.augment.requested:
            check_augmentation(settings.augment, splits)
        elif settings.select.requested:
            check_selection(settings.select, splits)
    return True


def run_to_report(run: "Run", plan: RunPlan) -> None:
    """Runs all stages, then writes the report and prints where the results are."""
    from pipelines.runs.files import write_json
    from pipelines.runs.publication import check_publishable
    from pipelines.stages.deliver.export import check_rejected
    from pipelines.stages.deliver.report import REPORT, STUDENT, print_results, publish_results, report_stage
    from pipelines.stages.prepare.data import read_task

    settings = plan.settings
    if run.world.is_rank_zero:
        check_publishable(run.output / STUDENT)
        check_publishable(run.output / NESTED_FOLDER)
        write_json(run.output / "config.json", asdict(settings))
    stages, students = run_stages(run, plan)
    if settings.until != "report":
        rows = [(name, f"{stage.manifest['wall_seconds']:.1f}", str(stage.folder)) for name, stage in stages.items()]
        run.console.table("Stages", ("stage", "seconds", "folder"), rows)
        return
    report = report_stage(run, reported_settings(settings), read_task(stages["data"]), stages["evaluate"])
    exports = {each.name: stages[f"export{each.suffix}"] for each in students}
    if run.world.is_rank_zero:
        places = publish_results(run, report, exports, find_preprocessing(stages))
        if settings.prune.nested:
            places |= publish_nested(run, stages)
        print_results(run.console, json.loads((report.folder / REPORT).read_text()), places)
    run.world.share_files()
    check_scores(settings, stages["evaluate"])
    check_rejected(list(exports.values()))


def publish_nested(run: "Run", stages: Mapping[str, "Artefact"]) -> dict[str, Path]:
    """Publishes the folder from which every student of a nested family can be loaded."""
    from distill.slicing.nested import SLICES
    from pipelines.runs.publication import link_tree, republish_folder
    from pipelines.stages.deliver.report import add_preprocessing
    from pipelines.stages.prepare.teacher import MODEL

    source = next(stage.folder / MODEL for stage in stages.values() if (stage.folder / MODEL / SLICES).is_file())
    with republish_folder(run.output / NESTED_FOLDER, run.console.say) as fresh:
        link_tree(source, fresh)
        add_preprocessing(fresh, find_preprocessing(stages))
    return {NESTED_FOLDER: run.output / NESTED_FOLDER}


def find_preprocessing(stages: Mapping[str, "Artefact"]) -> Path | None:
    """Returns the file that says how a deployed student's texts are cleaned; None without such cleaning."""
    from distill.data.clean.deployment import PREPROCESSING

    file = stages["clean"].folder / PREPROCESSING if "clean" in stages else None
    return file if file is not None and file.exists() else None


def check_scores(config: DistillConfig, evaluation: "Artefact") -> None:
    """Checks that the deployed students preserve the requested share of the teacher's validation score.

    The students' files are retained either way.

    Raises:
        InputError: A student preserves less; the message names all such students.
    """
    from pipelines.reports.schema import EVALUATION
    from pipelines.reports.targets import deployed_shares

    least = config.budget.min_score_share
    if not (config.budget.requested and least):
        return
    shares = deployed_shares(json.loads((evaluation.folder / EVALUATION).read_text()))
    if not shares:
        raise InputError(
            f"budget.min_score_share {least:g}: expected the teacher's file on {config.budget.runtime} to compare "
            "with, found none that was proven: nothing says what was kept"
        )
    missed = [describe_kept_share(name, share) for name, share in shares.items() if not share >= least]  # as NaN isn't
    if missed:
        reached = [describe_kept_share(name, share) for name, share in shares.items() if share >= least]
        raise InputError(
            f"budget.min_score_share {least:g}: expected at least {least:.1%} of the teacher's validation score, found "
            f"that {', '.join(missed)}. All files were written; request a lower speed-up, train for more epochs or add "
            "unlabelled text (--data.unlabelled)" + (f"; {reached[-1]}" if reached else "")
        )


def describe_kept_share(name: str, share: float) -> str:
    """Returns what a student keeps of a score as text: NaN if a score is undefined, as a correlation with constants."""
    return f"{name} keeps an undefined share" if isnan(share) else f"{name} keeps {share:.1%}"


def reported_settings(config: DistillConfig) -> dict[str, Any]:
    """Returns the configuration as shown in the report."""
    from pipelines.settings.schemes import describe_reduced_range

    settings = {
        name: value for name, value in asdict(config).items() if name not in ("output", "until", "dry_run", "predict")
    }
    return settings | {"quantize": settings["quantize"] | {"reduce_range": describe_reduced_range(config)}}
