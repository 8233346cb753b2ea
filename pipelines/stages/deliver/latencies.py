"""Latencies and speed-ups of the evaluated files, alone and in batches."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from compress.export.runtimes import build_opener
from compress.measure.blocks import BlockTimes, Effort, TimedGroup
from compress.measure.interval import estimate_ratio
from compress.measure.process import TimingProcess, open_timing_process
from pipelines.reports.schema import EstimateEntry
from pipelines.reports.targets import describe_load
from pipelines.runs.manifest import JsonObject
from pipelines.runs.stage import Run
from pipelines.settings.commands.distill import MeasureConfig
from pipelines.stages.deliver.evaluated_model import EvaluatedModel, Key, read_key
from pipelines.stages.deliver.timed_texts import EncodedTexts
from pipelines.stages.deliver.timing import CallConditions, estimate_entry, time_models

ENTRY_NAMES = (("latency", "speedup"), ("latency_batched", "speedup_batched"))  # entries of single texts and of batches


@dataclass(frozen=True)
class Measured:
    """Latencies and speed-ups by entry: measured here, or taken from the stages that measured a requested speed."""

    latencies: dict[Key, JsonObject]
    speedups: dict[Key, EstimateEntry]


def add_latencies(
    run: Run,
    candidates: Sequence[EvaluatedModel],
    entries: list[JsonObject],
    tests: Mapping[str, EncodedTexts],
    measure: MeasureConfig,
    end: float,
) -> None:
    """Adds latencies and speed-ups over the teacher to the entries, at one text per call and in batches.

    The models of a runtime are timed with the teacher's on the same blocks, until each of their speed-ups is known
    closely enough, or until `end`, a time of `time.perf_counter`.
    """
    count = min(len(test) for test, _ in tests.values())  # another tokenizer may yield fewer blocks
    openers = {
        (c.name, *target.where): build_opener(target, c.path(target), measure.threads)
        for c in candidates
        for target in c.targets
    }
    measurements: dict[int, Measured] = {}
    batches, shares = (1, min(measure.batch, count)), (0.5, 1.0)
    with open_timing_process(openers, measure.threads) as process:
        for (latency, speedup), batch, share in zip(ENTRY_NAMES, batches, shares, strict=True):
            if batch not in measurements:
                conditions = CallConditions(batch, 0, measure.threads)
                seconds = share * max(0.0, end - time.perf_counter())
                measurements[batch] = measure_entries(run, entries, process, tests, measure, conditions, seconds)
            for entry in entries:
                entry[latency] = measurements[batch].latencies[read_key(entry)]
                entry[speedup] = describe_speedup(read_key(entry), measurements[batch])
    if load := describe_load(process.processors.share):
        run.console.say(f"  evaluate: {load}")


def measure_entries(
    run: Run,
    entries: Sequence[JsonObject],
    process: TimingProcess[Key],
    tests: Mapping[str, EncodedTexts],
    measure: MeasureConfig,
    conditions: CallConditions,
    seconds: float,
) -> Measured:
    """Returns latencies and speed-ups under some conditions; what was measured under them already is reused."""
    measured = reuse_measurements(entries, conditions)
    groups = group_by_runtime([read_key(entry) for entry in entries], measured, measure.interval)
    names = [name for group in groups for name in group.names]
    if not names:
        return measured
    effort = Effort.plan(measure.texts, measure.rounds, conditions.batch, min(seconds, measure.seconds))
    texts = {name: tests[name[0]] for name in names}
    label = f"evaluate: timing batches of {conditions.batch}"
    times = time_models(run, label, process, texts, groups, conditions, effort)
    for name, block_times in times.items():
        measured.latencies[name] = asdict(block_times.summarize(conditions.threads))
        teacher = times.get(find_teacher_key(name))
        if teacher is not None and name != find_teacher_key(name):
            measured.speedups[name] = estimate_entry(estimate_ratio(teacher.fastest, block_times.fastest))
    return measured


def reuse_measurements(entries: Sequence[JsonObject], conditions: CallConditions) -> Measured:
    """Returns the latencies of students, and of their teachers, whose requested speed is that of these conditions."""
    measured = Measured({}, {})
    for entry in entries:
        target = entry.get("target")
        if target is None or target["length"] != conditions.length:
            continue
        if (target["student"]["batch"], target["student"]["threads"]) == (conditions.batch, conditions.threads):
            measured.latencies[read_key(entry)] = target["student"]
            measured.latencies[find_teacher_key(read_key(entry))] = target["teacher"]
            measured.speedups[read_key(entry)] = target["speedup"]
    return measured


def group_by_runtime(keys: Sequence[Key], known: Measured, interval: float) -> list[TimedGroup[Key]]:
    """Returns the models that remain to be timed, by runtime: those without a speed-up, and the teacher beside them."""
    groups = []
    for runtime in dict.fromkeys(runtime for _, runtime, _ in keys):
        names = [key for key in keys if key[1] == runtime and key not in known.latencies]
        reference = ("teacher", runtime, "fp32")
        if names and reference in keys and reference not in names:
            names.insert(0, reference)
        if names:
            groups.append(TimedGroup(names, partial(are_narrow, names=names, interval=interval)))
    return groups


def are_narrow(times: Mapping[Key, BlockTimes], names: Sequence[Key], interval: float) -> bool:
    """Returns whether all speed-ups over the teacher have intervals of at most this width; true without a teacher."""
    teacher = find_teacher_key(names[0])
    others = [name for name in names if name != teacher] if teacher in names else []
    return all(estimate_ratio(times[teacher].fastest, times[name].fastest).width <= interval for name in others)


def find_teacher_key(key: Key) -> Key:
    """Returns the key of the teacher in fp32 on the same runtime."""
    return ("teacher", key[1], "fp32")


def describe_speedup(key: Key, measured: Measured) -> JsonObject | None:
    """Returns an entry's speed-ups over the teacher in fp32; None without a teacher in PyTorch."""
    teacher = measured.latencies.get(("teacher", "pytorch", "fp32"))
    if teacher is None:
        return None
    estimate = measured.speedups.get(key)
    same = 1.0 if key == find_teacher_key(key) else None
    return {
        "vs_teacher_pytorch": teacher["best_ms"] / measured.latencies[key]["best_ms"],
        "vs_teacher_same_runtime": estimate["value"] if estimate else same,
        "same_runtime": estimate,
    }
