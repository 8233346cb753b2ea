"""The stages of a cascade: the answers and latencies of its models, and the choice of members and thresholds."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from compress.cascade.openers import open_cascade, open_with_margin
from compress.cascade.reader import Cascade, compute_probabilities, measure_margins
from compress.cascade.temperature import fit_temperature
from compress.cascade.thresholds import CascadeTarget, ChosenCascade, choose_cascade
from compress.cascade.write import classify_in_subprocess, write_cascade
from compress.errors import ExportError
from compress.export.verify import MIN_AGREEMENT
from compress.measure.process import Opener
from distill.checkpoint.checkpoint import Checkpoint, open_checkpoint
from distill.data.clean.deployment import PREPROCESSING
from distill.errors import InputError
from distill.tasks.choose import CLASSIFICATION, choose_task
from pipelines.runs.console import Console
from pipelines.runs.files import count_bytes, write_json
from pipelines.runs.manifest import JsonObject
from pipelines.runs.publication import link_tree, republish_folder
from pipelines.runs.stage import Artefact, Run
from pipelines.settings.commands.cascade import TEACHER_ROLE, CascadeConfig, name_members
from pipelines.stages.deliver.cascade_models import Arrays, CascadeModels
from pipelines.stages.deliver.export import check_rejected, remove_results
from pipelines.stages.deliver.standalone import check_evaluated_models, export_checkpoint
from pipelines.stages.prepare.compared_texts import select_texts_and_pairs
from pipelines.stages.prepare.data import data_stage

VERSION = 8  # of the algorithm of both stages; bump it when the same inputs give a different result (docs/stages.md)
CASCADE, CASCADE_EVALUATION = "cascade", "evaluation.json"


def run_cascade(config: CascadeConfig, console: Console) -> Artefact:
    """Exports and times the students, chooses a cascade of them, evaluates it and publishes its folder.

    Raises:
        InputError: A checkpoint, the data or the task is unsuitable, or no cascade reaches the requested score or
            latency.
    """
    roles = ({TEACHER_ROLE: config.teacher} if config.teacher else {}) | name_members(config.names)
    checkpoints = [open_checkpoint(name, role) for role, name in roles.items()]
    student = next(each for each in checkpoints if each.role != TEACHER_ROLE)
    task_name, reason = choose_task(config.task, student.config, student.name, config.data)
    check_members(checkpoints, task_name)
    run = Run(Path(config.output), config.seed, console)
    settings, note = check_evaluated_models(config.evaluation, task_name, checkpoints)
    console.say(f"  task: {task_name} ({reason}{note})")
    data = data_stage(run, settings.data, task_name)
    exported = []
    for each in checkpoints:
        model_settings = replace(settings, dynamic=settings.dynamic and each.role != TEACHER_ROLE)
        exported.append(export_checkpoint(run, model_settings, each, data))
    check_rejected([each.export for each in exported])
    models = CascadeModels(run, replace(config, data=settings.data), data, exported)
    done = thresholds_stage(models, member_logits_stage(models))
    with republish_folder(run.output / CASCADE, console.say) as fresh:
        link_tree(done.folder / CASCADE, fresh)
    return done


def check_members(checkpoints: Sequence[Checkpoint], task: str) -> None:
    """Checks that the models' answers have a confidence, and that they read texts as they come.

    Raises:
        InputError: The task doesn't classify whole texts, or a model's texts are cleaned by a file beside it.
    """
    if task not in CLASSIFICATION:
        raise InputError(
            f"cascade: expected task {' or '.join(sorted(CLASSIFICATION))}, found {task}: its answers have no "
            "probability by which one student could leave a text to the next"
        )
    for each in checkpoints:
        if (each.folder / PREPROCESSING).exists():
            raise InputError(
                f"{each.role} {each.name!r}: expected a model that reads texts as they come, found {PREPROCESSING} "
                "beside it: a cascade's reader can't clean texts, so that it would answer differently"
            )


def member_logits_stage(models: CascadeModels) -> Artefact:
    """Writes `validation.npz` and `test.npz`, the logits of every model, and measures the students' mean latencies."""

    def work(folder: Path) -> JsonObject:
        members = models.open_members()
        for part in ("validation", "test"):
            logits = {name: models.compute_logits(name, member, part) for name, member in members.items()}
            np.savez(folder / f"{part}.npz", **logits)  # type: ignore[arg-type]
        return time_students(models)

    return models.run.stage("member-logits", models.settings, models.inputs, work, version=VERSION)


def time_students(models: CascadeModels) -> JsonObject:
    """Returns each student's mean latency on validation texts, and what the margin of its answer adds to it, in ms."""
    students, threads = models.students, models.config.measure.threads
    inputs = {name: models.list_timed_inputs(name, "validation") for name in students}
    openers: dict[str, Opener] = models.build_openers(students)
    for name in students:
        openers[f"margin of {name}"] = partial(open_with_margin, models.folders[name], threads, models.multi_label)
    timed_inputs = inputs | {f"margin of {name}": each for name, each in inputs.items()}
    means = {name: float(each.mean()) for name, each in models.time_texts(openers, timed_inputs).items()}
    margins = {name: max(0.0, means[f"margin of {name}"] - means[name]) for name in students}
    return {"milliseconds": {name: means[name] for name in students}, "margin_ms": margins}


def thresholds_stage(models: CascadeModels, answers: Artefact) -> Artefact:
    """Writes `cascade/`: the chosen members, thresholds and temperatures, the reader, and `evaluation.json`.

    Raises:
        InputError: No cascade reaches the requested score or latency.
        ExportError: The written folder answers differently than its members.
    """
    config = models.config
    settings = models.settings | {"score": config.min_score_share, "latency_ms": config.latency_ms}

    def work(folder: Path) -> JsonObject:
        remove_results(folder)
        logits = {part: read_arrays(answers.folder / f"{part}.npz") for part in ("validation", "test")}
        truth, cascade_folder = models.find_truth("validation"), folder / CASCADE
        temperatures = {name: fit_temperature(logits["validation"][name], truth) for name in models.students}
        chosen = choose_members(models, logits["validation"], temperatures, answers.metrics)
        write_cascade(
            cascade_folder,
            chosen,
            models.folders,
            temperatures,
            labels=models.task.labels,
            multi_label=models.multi_label,
            max_lengths=models.find_max_lengths(),
        )
        combined, numbers = combine_logits(logits["test"], chosen, temperatures, multi_label=models.multi_label)
        verify_cascade(models, cascade_folder, combined, [chosen.order[number] for number in numbers])
        shares = {name: float((numbers == i).mean()) for i, name in enumerate(chosen.order)}
        entries = evaluate_cascade(models, cascade_folder, {CASCADE: combined} | logits["test"])
        entries[0]["shares"] = shares
        metric = next(iter(entries[0]["scores"]))
        write_json(cascade_folder / CASCADE_EVALUATION, {"metric": metric, "chosen": asdict(chosen), "models": entries})
        return {"score": entries[0]["score"], "mean_ms": entries[0]["mean_ms"], "shares": shares}

    inputs = models.inputs | {"answers": answers}
    return models.run.stage("thresholds", settings, inputs, work, version=VERSION)


def choose_members(
    models: CascadeModels, logits: Arrays, temperatures: Mapping[str, float], measured: JsonObject
) -> ChosenCascade:
    """Returns the cascade that the settings ask for.

    Args:
        models: All models.
        logits: Name -> logits of the validation split [rows, classes].
        temperatures: Student -> temperature of its logits.
        measured: The result of `time_members`.

    Raises:
        InputError: No cascade reaches the requested score or latency.
    """
    probabilities = {
        name: compute_probabilities(logits[name], temperatures[name], models.multi_label) for name in models.students
    }
    if models.config.latency_ms:
        aim = CascadeTarget(milliseconds=models.config.latency_ms)
    else:
        references = [TEACHER_ROLE] if TEACHER_ROLE in logits else models.students
        scores = [next(iter(models.score_logits("validation", logits[name]).values())) for name in references]
        aim = CascadeTarget(score=models.config.min_score_share * max(scores))
    truth = models.find_truth("validation")
    return choose_cascade(probabilities, truth, measured["milliseconds"], aim, margin_ms=measured["margin_ms"])


def combine_logits(
    logits: Arrays, chosen: ChosenCascade, temperatures: Mapping[str, float], *, multi_label: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Returns each row's logits from the member that answers it, [rows, classes], and the members' numbers [rows]."""
    last = len(chosen.order) - 1
    combined = logits[chosen.order[last]].copy()
    numbers = np.full(len(combined), last)
    for number in reversed(range(last)):
        member_logits = logits[chosen.order[number]]
        margins = measure_margins(
            compute_probabilities(member_logits, temperatures[chosen.order[number]], multi_label), multi_label
        )
        answered = margins >= chosen.thresholds[number]
        combined[answered], numbers[answered] = member_logits[answered], number
    return combined, numbers


def verify_cascade(models: CascadeModels, folder: Path, logits: np.ndarray, members: Sequence[str]) -> None:
    """Classifies texts of the test split with the written folder in a fresh process, and compares labels and members.

    Args:
        models: All models.
        folder: The folder.
        logits: Logits of the member that should answer, [rows, classes].
        members: That member of each row.

    Raises:
        ExportError: It answers differently.
    """
    rows = np.random.default_rng(models.run.seed).permutation(len(members))[: models.config.measure.parity]
    texts, pairs = select_texts_and_pairs(models.splits.test, rows)
    predicted = classify_in_subprocess(folder, texts if pairs is None else list(zip(texts, pairs, strict=True)))
    expected = [(models.find_label(logits[i]), members[i]) for i in rows]
    same = sum(one == other for one, other in zip(predicted, expected, strict=True)) / len(rows)
    if same < MIN_AGREEMENT:
        raise ExportError(
            f"cascade: {folder} answers {same:.2%} of {len(rows)} texts as its members do, expected at least "
            f"{MIN_AGREEMENT:.1%}: it would score differently than reported"
        )
    models.run.console.say(f"  cascade: reloaded in a fresh process, {same:.2%} of {len(rows)} answers equal")


def evaluate_cascade(models: CascadeModels, folder: Path, logits: Arrays) -> list[JsonObject]:
    """Returns an entry for the cascade, then one for each model alone; all are timed in turn on the same texts.

    `logits` are those of the test split.
    """
    threads, names = models.config.measure.threads, Cascade(folder).names
    inputs: dict[str, Sequence[Any]] = {name: models.list_timed_inputs(name, "test") for name in models.folders}
    together = list(zip(*(inputs[name] for name in names), strict=True))
    openers = {CASCADE: partial(open_cascade, folder, threads)} | models.build_openers(models.folders)
    times = models.time_texts(openers, {CASCADE: together} | inputs)
    entries = []
    for name, model_logits in logits.items():
        scores = models.score_logits("test", model_logits)
        entry: JsonObject = {"name": name, "score": next(iter(scores.values())), "scores": scores}
        entry |= {"mean_ms": float(times[name].mean()), "p95_ms": float(np.quantile(times[name], 0.95))}
        entries.append(entry | {"bytes": count_bytes(folder if name == CASCADE else models.folders[name])})
    return entries


def read_arrays(file: Path) -> Arrays:
    """Returns the arrays of a file."""
    with np.load(file) as stored:
        return {name: stored[name] for name in stored.files}
