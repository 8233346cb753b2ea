"""Speeds of replicas: read from settings, corrected by measurements, summarised and kept with a checkpoint."""

from types import SimpleNamespace

import pytest

from distill.data.batches.rank_speeds import RankSpeeds, parse_speeds
from distill.errors import InputError
from pipelines.runs.rank_meter import RankMeter, summarize_rank_times
from pipelines.runs.training_logs import TrainingLogs


def test_changed_speeds_apply_from_their_batch_on_and_are_restored():
    speeds = RankSpeeds([1, 1])
    speeds.change(10, [2, 1])
    speeds.change(30, [3, 1])
    assert [speeds.find(position) for position in (0, 9, 10, 29, 30)] == [(1, 1), (1, 1), (2, 1), (2, 1), (3, 1)]
    again = RankSpeeds([1, 1])
    again.load_state_dict(speeds.state_dict())
    assert [again.find(position) for position in (9, 10, 30)] == [(1, 1), (2, 1), (3, 1)]


def test_speeds_of_another_number_of_processes_are_forgotten():
    speeds = RankSpeeds([1, 1, 1])
    speeds.load_state_dict(RankSpeeds([1, 5]).state_dict())
    assert speeds.find(0) == (1, 1, 1)


def test_measured_speeds_apply_to_batches_that_no_loader_has_prepared(tmp_path):
    data = SimpleNamespace(threads=1, batches=SimpleNamespace(position=6))
    meter = RankMeter(RankSpeeds([1, 1]), data, TrainingLogs(tmp_path))
    for _ in range(12):
        meter.correct([300.0, 100.0])
    assert meter.speeds.find(9) == (1, 1)
    first, second = meter.speeds.find(10)
    assert first / second == pytest.approx(3, rel=0.01)


def test_a_replica_is_idle_while_it_waits_for_the_slowest():
    first, second = summarize_rank_times([[1.0, 2.0], [1.0, 2.0]], None)
    assert first["idle_share"] == pytest.approx(0.5)
    assert second["idle_share"] == 0


@pytest.mark.parametrize("text", ["1", "1,0", "1,x", "1,2,3", "-1,1"])
def test_invalid_speeds_are_rejected(text):
    with pytest.raises(InputError, match="machine.rank_speeds: expected auto, or 2 numbers above 0"):
        parse_speeds(text, 2)


def test_speeds_may_be_given_measured_or_equal():
    assert parse_speeds("", 2) is None
    assert parse_speeds("auto", 2).newest == (1, 1)
    assert parse_speeds("1,2.5", 2).newest == (1, 2.5)
