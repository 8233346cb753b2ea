"""The evaluate stage: score, size and measured speed of every model in every runtime."""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from compress.export.common.targets import ExportTarget
from compress.export.runtimes import open_export
from pipelines.reports.schema import EVALUATION
from pipelines.runs.console import TEXTS
from pipelines.runs.files import count_bytes
from pipelines.runs.manifest import JsonObject
from pipelines.runs.stage import Artefact, Run
from pipelines.settings.commands.distill import MeasureConfig
from pipelines.settings.this_machine import describe_machine
from pipelines.stages.deliver.baseline import BASELINE
from pipelines.stages.deliver.evaluated_model import EvaluatedModel, Key, read_key
from pipelines.stages.deliver.export import HUGGINGFACE
from pipelines.stages.deliver.latencies import add_latencies
from pipelines.stages.deliver.timed_texts import EncodedTexts, encode_split, to_arrays

if TYPE_CHECKING:
    import numpy as np

    from compress.measure.latency import Runner, TimedInputs
    from distill.data.splits.examples import Splits
    from distill.tasks.scorer import Scorer
    from distill.tasks.task import Task


VERSION = 5  # of this stage's algorithm; bump it when the same inputs give a different result (docs/stages.md)


def evaluate_stage(
    run: Run,
    candidates: Sequence[EvaluatedModel],
    splits: "Splits",
    data: Artefact,
    measure: MeasureConfig,
    max_length: int,
    task: "Task",
    seconds: float,
) -> Artefact:
    """Writes `evaluation.json`, an entry for each model in each runtime with the teacher first, and `baseline.json`.

    The baseline is the score reached without a model; it is omitted for tasks where it is meaningless. After `seconds`
    from the start of the stage, no more than the least number of texts is timed.
    """
    # The result is a measurement on this machine, so the machine is part of the stage's key.
    settings: JsonObject = {"measure": asdict(measure), "max_length": max_length, "machine": describe_machine()}
    scored = {each.name: str(each.scored) for each in candidates if each.scored is not None}
    settings |= {"scored": scored} if scored else {}
    speeds = {each.name: each.speed for each in candidates if each.speed is not None}
    settings |= {"speeds": {name: [each.retries, each.reason] for name, each in speeds.items()}} if speeds else {}
    inputs = {"data": data} | {each.name: each.export for each in candidates}
    inputs |= {f"speed of {name}": each.stage for name, each in speeds.items()}

    def work(folder: Path) -> JsonObject:
        end = time.perf_counter() + seconds
        tests = {each.name: encode_split(each.path(HUGGINGFACE), splits.test, max_length, task) for each in candidates}
        entries = score_models(run, candidates, splits, max_length, task, tests)
        add_latencies(run, candidates, entries, tests, measure, end)
        (folder / EVALUATION).write_text(json.dumps(entries, indent=1))
        if baseline := baseline_scores(task, splits, tests[candidates[0].name]):
            (folder / BASELINE).write_text(json.dumps(baseline, indent=1))
        return {"_".join(read_key(entry)): entry["score"] for entry in entries}

    return run.stage("evaluate", settings, inputs, work, version=VERSION)


def score_models(
    run: Run,
    candidates: Sequence[EvaluatedModel],
    splits: "Splits",
    max_length: int,
    task: "Task",
    tests: Mapping[str, EncodedTexts],
) -> list[JsonObject]:
    """Returns entries without latencies: each model's scores on the whole test split, and its requested speed."""
    entries, predicted = [], {}
    for candidate in candidates:
        for target in candidate.targets:
            entry, classes = score_model(run, candidate, target, task, tests[candidate.name])
            if target == candidate.scored:
                entry["validation"] = validation_score(run, candidate, target, splits, max_length, task)
            if candidate.speed is not None and target == candidate.speed.target:
                entry["target"] = candidate.speed.read()
            predicted[read_key(entry)] = classes
            entries.append(entry)
    compare_with_teacher(entries, predicted)
    return entries


def validation_score(
    run: Run, candidate: EvaluatedModel, target: ExportTarget, splits: "Splits", max_length: int, task: "Task"
) -> float:
    """Returns the deployed file's validation score at one text per call, as in deployment.

    Dynamic int8 computes its ranges over all texts of a call, so larger batches would score differently.
    """
    import torch

    encoded = encode_split(candidate.path(HUGGINGFACE), splits.validation, max_length, task)
    runner = open_export(target, candidate.path(target), torch.get_num_threads())
    with run.console.track(f"evaluate: {candidate.name} on validation", len(encoded[0]), TEXTS) as advance:
        return float(next(iter(score_rows(runner, task, encoded, 1, advance).scores().values())))


def score_rows(
    runner: "Runner[TimedInputs]",
    task: "Task",
    encoded: EncodedTexts,
    batch_size: int,
    on_rows: Callable[[int], None] = lambda count: None,
) -> "Scorer":
    """Returns the task's scorer after all rows; `on_rows` is called with the number of rows of each batch."""
    import torch

    from distill.data.batches.batches import EvalBatches

    rows, pad_id = encoded
    batches, scorer = EvalBatches(rows, batch_size, pad_id), task.scorer(rows)
    for numbers, batch in zip(batches.order, batches, strict=True):
        scorer.record(numbers, batch, torch.from_numpy(runner(to_arrays(batch))))
        on_rows(len(numbers))
    return scorer


def score_model(
    run: Run, candidate: EvaluatedModel, target: ExportTarget, task: "Task", encoded: EncodedTexts
) -> tuple[JsonObject, "np.ndarray"]:
    """Returns an entry without latencies, and the model's decisions on the test split."""
    import torch

    (test, _), (runtime, precision) = encoded, target.where
    folder = candidate.path(target)
    runner = open_export(target, folder, torch.get_num_threads())
    with run.console.track(f"evaluate: {candidate.name} in {runtime} {precision}", len(test), TEXTS) as advance:
        scorer = score_rows(runner, task, encoded, task.eval_batch_size, advance)
    scores = scorer.scores()
    proof = next(each for each in candidate.export.metrics["parity"] if each["target"] == str(target))
    entry = {
        "name": candidate.name,
        "stage": candidate.stage,
        "path": str(folder),
        "runtime": runtime,
        "precision": precision,
        "score": next(iter(scores.values())),
        "scores": scores,
        "params": count_stored_parameters(candidate.path(HUGGINGFACE)),
        "bytes": count_bytes(folder),
        "parity": {name: value for name, value in proof.items() if name not in ("target", "bytes")},
    }
    return entry, scorer.decisions()


def count_stored_parameters(folder: Path) -> int:
    """Returns the number of parameters of a checkpoint, read from the headers of its weight files."""
    from math import prod

    from safetensors import safe_open

    from compress.quantize.store import QUANTIZATION_FILE

    total = 0
    for file in (each for each in folder.glob("*.safetensors") if each.name != QUANTIZATION_FILE):
        with safe_open(file, framework="np") as weights:
            total += sum(prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118
    return total


def compare_with_teacher(entries: list[JsonObject], predicted: Mapping[Key, "np.ndarray"]) -> None:
    """Adds the agreement with the teacher's decisions; None without a teacher's checkpoint to compare with."""
    reference = predicted.get(("teacher", "pytorch", "fp32"))
    for entry in entries:
        entry["agreement_with_teacher"] = None
        if reference is not None:
            decisions = predicted[read_key(entry)]
            # A student with its own tokenizer decides at other positions.
            same = decisions.shape == reference.shape
            entry["agreement_with_teacher"] = float((decisions == reference).mean()) if same else None


def baseline_scores(task: "Task", splits: "Splits", encoded: EncodedTexts) -> JsonObject | None:
    """Returns name, answer and test scores of the constant answer suggested by the training split.

    Returns None for tasks without a baseline. Undefined scores, such as a correlation with a constant, are None.
    """
    baseline = task.baseline(splits.train)
    if baseline is None:
        return None
    scorer = score_rows(lambda inputs: baseline.logits(*inputs["input_ids"].shape), task, encoded, task.eval_batch_size)
    scores = {name: score if math.isfinite(score) else None for name, score in scorer.scores().items()}
    return {"name": baseline.name, "answer": baseline.answer, "scores": scores}
