"""The evaluate stage: score, size and measured speed of every model in every runtime."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from compress.export.common.targets import ExportTarget, target_of
from compress.export.runtimes import open_export
from pipelines.runs.console import CALLS, TEXTS
from pipelines.runs.files import count_bytes
from pipelines.runs.manifest import JsonObject
from pipelines.runs.stage import Artefact, Run
from pipelines.settings.distill_config import MeasureConfig
from pipelines.settings.this_machine import describe_machine
from pipelines.stages.deliver.baseline import BASELINE
from pipelines.stages.deliver.export import HUGGINGFACE

if TYPE_CHECKING:
    import numpy as np

    from compress.measure.latency import Runner
    from distill.data.batches.batches import EncodedRows
    from distill.data.batches.encode import Batch
    from distill.data.splits.examples import Splits
    from distill.tasks.scorer import Scorer
    from distill.tasks.task import Task


VERSION = 1  # of this stage's algorithm; bump it when the same inputs give a different result (docs/stages.md)
Key: TypeAlias = tuple[str, str, str]  # name, runtime, precision


@dataclass(frozen=True)
class EvaluatedModel:
    """A model to measure: its role, the stage that built it, and its export.

    `judged` is the target whose validation score is compared with the required minimum.
    """

    name: str
    stage: str
    export: Artefact
    judged: ExportTarget | None = None

    @property
    def targets(self) -> list[ExportTarget]:
        """Targets of its export that are measured."""
        proven = [target_of(proof["target"]) for proof in self.export.metrics["parity"]]
        return [target for target in proven if target.measured]

    def path(self, target: ExportTarget) -> Path:
        """Returns the folder of an exported target."""
        return self.export.folder / str(target)


def evaluate_stage(
    run: Run,
    candidates: Sequence[EvaluatedModel],
    splits: "Splits",
    data: Artefact,
    measure: MeasureConfig,
    max_length: int,
    task: "Task",
) -> Artefact:
    """Writes `evaluation.json`, an entry for each model in each runtime with the teacher first, and `baseline.json`.

    The baseline is the score reached without a model; it is omitted for tasks where it is meaningless.
    """
    # The result is a measurement on this machine, so the machine is part of the stage's key.
    settings: JsonObject = {"measure": asdict(measure), "max_length": max_length, "machine": describe_machine()}
    judged = {each.name: str(each.judged) for each in candidates if each.judged is not None}
    settings |= {"judged": judged} if judged else {}
    inputs = {"data": data} | {each.name: each.export for each in candidates}

    def work(folder: Path) -> JsonObject:
        entries = evaluate(run, candidates, splits, measure, max_length, task)
        (folder / "evaluation.json").write_text(json.dumps(entries, indent=1))
        encoded = encode_part(candidates[0], splits.test, max_length, task)
        if baseline := baseline_scores(task, splits, encoded):
            (folder / BASELINE).write_text(json.dumps(baseline, indent=1))
        return {"_".join(key_of(entry)): entry["score"] for entry in entries}

    return run.stage("evaluate", settings, inputs, work, version=VERSION)


def evaluate(
    run: Run,
    candidates: Sequence[EvaluatedModel],
    splits: "Splits",
    measure: MeasureConfig,
    max_length: int,
    task: "Task",
) -> list[JsonObject]:
    """Scores every model on the whole test split, then times all of them in turn."""
    entries, predicted, tests = [], {}, {}
    for candidate in candidates:
        tests[candidate.name] = encode_part(candidate, splits.test, max_length, task)
        for target in candidate.targets:
            entry, classes = score_model(run, candidate, target, task, tests[candidate.name])
            if target == candidate.judged:
                entry["validation"] = validation_score(run, candidate, target, splits, max_length, task)
            predicted[key_of(entry)] = classes
            entries.append(entry)
    time_all(run, candidates, entries, tests, measure)
    compare_with_teacher(entries, predicted)
    return entries


def key_of(entry: JsonObject) -> Key:
    """Returns the model, runtime and precision of an entry."""
    return entry["name"], entry["runtime"], entry["precision"]


def encode_part(candidate: EvaluatedModel, part: object, max_length: int, task: "Task") -> tuple["EncodedRows", int]:
    """Returns a split encoded by the candidate's own tokenizer, and its pad id."""
    from pipelines.stages.prepare.vocabulary import tokenizer_of

    tokenizer = tokenizer_of(candidate.path(HUGGINGFACE))
    return task.encode(tokenizer, part, max_length), int(tokenizer.pad_token_id or 0)


def validation_score(
    run: Run, candidate: EvaluatedModel, target: ExportTarget, splits: "Splits", max_length: int, task: "Task"
) -> float:
    """Returns the deployed file's validation score at one text per call, as in deployment.

    Dynamic int8 computes its ranges over all texts of a call, so larger batches would score differently.
    """
    import torch

    encoded = encode_part(candidate, splits.validation, max_length, task)
    runner = open_export(target, candidate.path(target), torch.get_num_threads())
    with run.console.track(f"evaluate: {candidate.name} on validation", len(encoded[0]), TEXTS) as advance:
        return float(next(iter(score_rows(runner, task, encoded, 1, advance).scores().values())))


def score_rows(
    runner: "Runner",
    task: "Task",
    encoded: tuple["EncodedRows", int],
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
    run: Run, candidate: EvaluatedModel, target: ExportTarget, task: "Task", encoded: tuple["EncodedRows", int]
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


def to_arrays(batch: "Batch") -> dict[str, "np.ndarray"]:
    """Returns the model inputs of a batch as arrays, with token types, which are 0 if the batch has none."""
    from distill.models.inputs import select_inputs

    inputs = select_inputs(batch)
    inputs.setdefault("token_type_ids", batch["input_ids"] * 0)  # the models' own default for single texts
    return {name: value.numpy() for name, value in inputs.items()}


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


def time_all(
    run: Run,
    candidates: Sequence[EvaluatedModel],
    entries: list[JsonObject],
    tests: Mapping[str, tuple["EncodedRows", int]],
    measure: MeasureConfig,
) -> None:
    """Adds `latency` (batch 1) and `latency_batched` to the entries; all models take turns on the same texts."""
    import numpy as np

    from compress.measure.latency import measure_latency

    runners = {
        (c.name, *target.where): open_export(target, c.path(target), measure.threads)
        for c in candidates
        for target in c.targets
    }
    count = min(len(test) for test, _ in tests.values())  # another tokenizer may yield fewer blocks
    rows = np.random.default_rng(run.seed).permutation(count)
    size = min(measure.batch, count)
    groups = [rows[i : i + size] for i in range(0, count, size)][: max(1, measure.texts // measure.batch)]
    groups = [group for group in groups if len(group) == size]
    for key, chosen in (("latency", rows[: measure.texts, None]), ("latency_batched", groups)):
        batches = {
            name: [to_arrays(test.collate(group, pad_id)) for group in chosen] for name, (test, pad_id) in tests.items()
        }
        total = len(chosen) * (measure.rounds + 1) * len(runners)
        with run.console.track(f"evaluate: timing batches of {len(chosen[0])}", total, CALLS) as advance:
            latencies = measure_latency(
                runners,
                {runner: batches[runner[0]] for runner in runners},
                rounds=measure.rounds,
                threads=measure.threads,
                on_call=lambda: advance(1),
            )
        for entry in entries:
            entry[key] = asdict(latencies[key_of(entry)])


def compare_with_teacher(entries: list[JsonObject], predicted: Mapping[Key, "np.ndarray"]) -> None:
    """Adds speed-ups over the teacher in fp32 and the agreement with its decisions.

    Both are None without a teacher, or where there is no file of it to compare with.
    """
    teacher = {e["runtime"]: e for e in entries if e["name"] == "teacher" and e["precision"] == "fp32"}
    for entry in entries:
        for key, latency in (("speedup", "latency"), ("speedup_batched", "latency_batched")):
            entry[key] = None
            if "pytorch" in teacher:
                own, same = entry[latency]["best_ms"], teacher.get(entry["runtime"])
                entry[key] = {
                    "vs_teacher_pytorch": teacher["pytorch"][latency]["best_ms"] / own,
                    "vs_teacher_same_runtime": same[latency]["best_ms"] / own if same else None,
                }
        entry["agreement_with_teacher"] = None
        if "pytorch" in teacher:
            own, others = predicted[key_of(entry)], predicted["teacher", "pytorch", "fp32"]
            # A student with its own tokenizer decides at other positions.
            entry["agreement_with_teacher"] = float((own == others).mean()) if own.shape == others.shape else None


def baseline_scores(task: "Task", splits: "Splits", encoded: tuple["EncodedRows", int]) -> JsonObject | None:
    """Returns name, answer and test scores of the constant answer suggested by the training split.

    Returns None for tasks without a baseline. Undefined scores, such as a correlation with a constant, are None.
    """
    baseline = task.baseline(splits.train)
    if baseline is None:
        return None
    scorer = score_rows(lambda inputs: baseline.logits(*inputs["input_ids"].shape), task, encoded, task.eval_batch_size)
    scores = {
        name: score_model if math.isfinite(score_model) else None for name, score_model in scorer.scores().items()
    }
    return {"name": baseline.name, "answer": baseline.answer, "scores": scores}
