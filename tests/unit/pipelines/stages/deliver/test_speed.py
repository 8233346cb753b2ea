"""Tests when a measured student is pruned again, and how much of a run its measurement may take."""

from pathlib import Path

import numpy as np
import pytest

from compress.measure.blocks import BlockTimes
from pipelines.runs.console import Console
from pipelines.runs.stage import Artefact, Run
from pipelines.settings.plan import SpeedTarget
from pipelines.stages.deliver.evaluated_model import read_key
from pipelines.stages.deliver.latencies import group_by_runtime, reuse_measurements
from pipelines.stages.deliver.speed import estimate_share, find_correction
from pipelines.stages.deliver.timing import CallConditions, estimate_entry, remaining_seconds


def build_estimate(value: float, low: float, high: float | None, *, settled: bool = True) -> dict:
    return {"share": {"value": value, "low": low, "high": high}, "settled": settled}


@pytest.mark.parametrize(
    ("speed", "factor"),
    [
        (build_estimate(1.2, 1.17, 1.23), None),
        (build_estimate(0.96, 0.94, 0.98), None),
        (build_estimate(0.93, 0.91, 0.955), 1 / 0.93),  # the estimate decides: it is the speed that is reported
        (build_estimate(0.80, 0.79, 0.81), 1 / 0.80),
        (build_estimate(0.93, 0.80, 1.10, settled=False), None),  # too noisy to tell
        (build_estimate(0.80, 0.70, 0.90, settled=False), 1 / 0.80),
        (build_estimate(0.50, 0.0, None, settled=False), None),
    ],
)
def test_a_student_is_too_slow_by_its_estimate_or_if_that_is_uncertain_by_its_whole_interval(speed, factor):
    assert find_correction(speed) == (None if factor is None else pytest.approx(factor))


def times_of(student_ms: float) -> dict[str, BlockTimes]:
    """Returns times of texts that take a student `student_ms` at the median, and the teacher 10."""
    texts = np.random.default_rng(0).uniform(1, 2, (8, 1, 4))
    texts /= np.median(texts)
    scaled = {"teacher": 10.0, "copy": 10.0, "student": student_ms}
    return {name: BlockTimes(list(milliseconds * texts)) for name, milliseconds in scaled.items()}


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (SpeedTarget("10x", 10.0, 0.0), 0.8),
        (SpeedTarget("1ms", 0.0, 1.0), 0.8),
        (SpeedTarget("16000tps", 0.0, 2.0, texts_per_second=16000), 1.6),  # 32 texts in 2 ms
    ],
)
def test_the_share_of_a_request_is_the_measured_speed_over_the_requested_one(target, expected):
    share = estimate_share(target, times_of(1.25))
    assert share.value == pytest.approx(expected)
    assert share.low <= share.value <= share.high


def test_evaluation_gets_a_fifth_of_the_total_time_of_a_run(tmp_path: Path):
    run = Run(tmp_path / "run", 0, Console(quiet=True), dry=True)
    stage_seconds = {"teacher": 100.0, "distill-10x": 280.0, "export-10x": 20.0, "speed-10x": 30.0}
    run.done = [Artefact(name, tmp_path, "", {"wall_seconds": seconds}) for name, seconds in stage_seconds.items()]
    assert remaining_seconds(run) == pytest.approx(70), "100 of 500 in all, 30 are spent"
    run.done.append(Artefact("evaluate", tmp_path, "", {"wall_seconds": 200.0}))
    assert remaining_seconds(run) == 0


def build_entry(name: str, runtime: str, precision: str, target: dict | None = None) -> dict:
    return {"name": name, "runtime": runtime, "precision": precision} | ({"target": target} if target else {})


def test_measurements_of_the_budget_are_reused_under_the_same_conditions():
    target = {
        "length": 0,
        "teacher": {"batch": 1, "threads": 1, "best_ms": 8.0},
        "student": {"batch": 1, "threads": 1, "best_ms": 2.0},
        "speedup": {"value": 4.0, "low": 3.9, "high": 4.1},
    }
    entries = [build_entry("teacher", "pytorch", "fp32"), build_entry("teacher", "onnxruntime", "fp32")]
    entries += [build_entry("student", "pytorch", "fp32"), build_entry("student", "onnxruntime", "int8", target)]
    keys = [read_key(each) for each in entries]
    known = reuse_measurements(entries, CallConditions(1, 0, 1))
    assert known.speedups == {keys[3]: target["speedup"]}
    assert known.latencies == {keys[1]: target["teacher"], keys[3]: target["student"]}
    assert [list(group.names) for group in group_by_runtime(keys, known, 0.05)] == [[keys[0], keys[2]]]
    for other in (CallConditions(32, 0, 1), CallConditions(1, 0, 2), CallConditions(1, 16, 1)):
        assert not reuse_measurements(entries, other).latencies
    both = [*keys, ("student", "onnxruntime", "fp32")]
    assert [list(group.names) for group in group_by_runtime(both, known, 0.05)][1] == [keys[1], both[-1]], (
        "the teacher is timed beside the file that isn't"
    )


def test_an_unbounded_interval_is_stored_without_infinity():
    times = times_of(1.0)
    for each in times.values():
        each.times = each.times[:1]
    stored = estimate_entry(estimate_share(SpeedTarget("10x", 10.0, 0.0), times))
    assert stored == {"value": pytest.approx(1.0), "low": 0.0, "high": None}
