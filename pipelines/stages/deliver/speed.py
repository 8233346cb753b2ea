"""The speed stage: how fast an exported student is under the conditions of its budget, beside two teachers."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from compress.export.runtimes import build_opener
from compress.measure.blocks import BlockTimes, Effort, TimedGroup
from compress.measure.interval import Estimate, estimate_median, estimate_ratio
from compress.measure.process import TimingProcess, open_timing_process
from compress.prune.budget import TOLERANCE
from pipelines.reports.schema import LatencyEntry, SpeedMeasurement, TargetEntry
from pipelines.reports.targets import MeasuredSpeed, describe_measurement, describe_target, format_speed
from pipelines.runs.files import write_json
from pipelines.runs.manifest import JsonObject
from pipelines.runs.stage import Artefact, Run
from pipelines.settings.commands.distill import DistillConfig
from pipelines.settings.plan import SpeedTarget
from pipelines.settings.this_machine import describe_machine
from pipelines.stages.deliver.export import HUGGINGFACE
from pipelines.stages.deliver.exported_targets import find_budget_target
from pipelines.stages.deliver.timed_texts import EncodedTexts, encode_split
from pipelines.stages.deliver.timing import (
    CallConditions,
    describe_effort,
    estimate_entry,
    time_models,
)
from pipelines.stages.prepare.data import read_data, read_task

VERSION = 4  # of this stage's algorithm; bump it when the same inputs give a different result (docs/stages.md)
SPEED = "speed.json"
TEACHER, COPY, STUDENT = "teacher", "copy", "student"


def speed_stage(
    run: Run,
    config: DistillConfig,
    target: SpeedTarget,
    data: Artefact,
    exports: Mapping[str, Artefact],
    seconds: float,
) -> Artefact | None:
    """Writes `speed.json`: the speed of an exported student, its interval, and how far two equal teachers differ.

    The teacher's file is opened a second time, and this copy takes turns like the other models.

    Args:
        run: The run.
        config: Its settings.
        target: The requested speed.
        data: The data stage; texts of its test split are timed.
        exports: The exports of `teacher` and `student`.
        seconds: Time after which no more than the least number of texts is timed, if `measure.seconds` allow as much.

    Returns:
        The stage; None if a file that the budget is about failed its verification.
    """
    if any(export.digest is None for export in exports.values()):
        return run.plan_stage(f"speed-{target.name}")
    files = {name: find_budget_target(config.budget, teacher=name == TEACHER) for name in exports}
    for name, export in exports.items():
        if str(files[name]) not in [proof["target"] for proof in export.metrics["parity"]]:
            run.console.say(f"  speed-{target.name}: not measured, because {export.name} has no {files[name]}")
            return None
    settings = {
        "target": asdict(target.uncorrected),
        "budget": config.budget.timing_settings(),
        "measure": describe_effort(config.measure),
        "max_length": config.data.max_length,
        "machine": describe_machine(),
    }

    def work(folder: Path) -> JsonObject:
        paths = {name: export.folder / str(files[name]) for name, export in exports.items()}
        openers = {name: build_opener(files[name], path, config.budget.threads) for name, path in paths.items()}
        openers[COPY] = openers[TEACHER]
        task, part = read_task(data), read_data(data).test
        texts = {
            name: encode_split(export.folder / str(HUGGINGFACE), part, config.data.max_length, task)
            for name, export in exports.items()
        }
        texts[COPY] = texts[TEACHER]
        limit = seconds / len(config.budget.lengths)
        with open_timing_process(openers, config.budget.threads) as process:
            measured = [
                measure_speed(run, config, target, length, process, texts, limit) for length in config.budget.lengths
            ]
        slowest = min(measured, key=lambda each: each["share"]["value"])
        requested = cast(TargetEntry, asdict(target.uncorrected))
        lengths = {"lengths": measured} if len(measured) > 1 else {}
        write_json(folder / SPEED, {"target": requested, **slowest, **lengths})
        share = slowest["share"]
        speed = format_speed(requested, MeasuredSpeed(share["value"], share["low"], share["high"]))
        run.console.say(
            f"  speed-{target.name}: {speed}, {describe_target(requested)} requested; {describe_measurement(slowest)}"
        )
        return {name: slowest[name] for name in ("share", "settled")}

    return run.stage(f"speed-{target.name}", settings, {"data": data} | dict(exports), work, version=VERSION)


def measure_speed(
    run: Run,
    config: DistillConfig,
    target: SpeedTarget,
    length: int,
    process: TimingProcess[str],
    texts: Mapping[str, EncodedTexts],
    seconds: float,
) -> SpeedMeasurement:
    """Times teacher, its copy and student on texts of a length (0: their own) until the student's speed is settled."""
    budget, measure = config.budget, config.measure
    conditions = CallConditions(budget.batch, length, budget.threads)
    effort = Effort.plan(measure.texts, measure.rounds, budget.batch, min(seconds, measure.seconds))

    def is_settled(times: Mapping[str, BlockTimes]) -> bool:
        return estimate_share(target, times).width <= measure.interval

    label = f"speed-{target.name}: timing" + (f" {length} tokens" if length else "")
    group = TimedGroup((TEACHER, COPY, STUDENT), is_settled)
    times = time_models(run, label, process, texts, [group], conditions, effort)
    fastest = {name: each.fastest for name, each in times.items()}
    return {
        "length": length,
        "teacher": cast(LatencyEntry, asdict(times[TEACHER].summarize(budget.threads))),
        "student": cast(LatencyEntry, asdict(times[STUDENT].summarize(budget.threads))),
        "speedup": estimate_entry(estimate_ratio(fastest[TEACHER], fastest[STUDENT])),
        "milliseconds": estimate_entry(estimate_median(fastest[STUDENT])),
        "share": estimate_entry(estimate_share(target, times)),
        "control": estimate_entry(estimate_ratio(fastest[TEACHER], fastest[COPY])),
        "texts": fastest[STUDENT].size * budget.batch,
        "rounds": effort.rounds,
        "settled": is_settled(times),
        "other_load": process.processors.share,
    }


def estimate_share(target: SpeedTarget, times: Mapping[str, BlockTimes]) -> Estimate:
    """Returns the student's speed relative to the requested one."""
    if target.latency_ms:
        return estimate_median(times[STUDENT].fastest).invert().scale(target.latency_ms)
    return estimate_ratio(times[TEACHER].fastest, times[STUDENT].fastest).scale(1 / target.speedup)


def find_correction(measured: Mapping[str, Any]) -> float | None:
    """Returns by what factor a student has to be faster, from `share` and `settled` of a measurement; None if it isn't.

    A student is too slow if it is more than TOLERANCE below the requested speed: by the estimate itself if its interval
    is narrow, because the estimate is the speed that is reported. With a wide interval, the whole interval must be
    below: on a machine too noisy to tell, a training and some accuracy would be spent on noise.
    """
    share = measured["share"]
    likely = share["value"] if measured["settled"] else share["high"]
    return 1 / share["value"] if likely is not None and is_slow(likely) else None


def is_slow(share: float) -> bool:
    """Returns whether a speed, relative to the requested one, misses its target."""
    return share < 1 - TOLERANCE
