"""Tests measurements: every model gets the same work in a fair order, and measuring has no side effects."""

import os
import platform
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from compress.measure import latency as latencies
from compress.measure import memory, precision_modes, precision_speed
from compress.measure.latency import TEXTS_PER_TURN, Latency, limit_torch_threads, measure_latency
from compress.measure.precision_modes import list_candidate_modes
from compress.measure.precision_speed import MAX_SLOWDOWN, autocast_to_mode, choose_fastest_mode, measure_modes
from pipelines.settings import this_machine
from support.clock import Clock
from support.tiny_models import build_model

LENGTHS = (3, 9, 4, 30)
NAMES = ("teacher", "student", "onnx")
TEXTS = [{"input_ids": np.full((2, length), length)} for length in LENGTHS]
INPUTS = dict.fromkeys(NAMES, TEXTS)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(latencies, "time", fake)
    monkeypatch.setattr(precision_speed, "time", fake)
    return fake


@pytest.fixture
def one_warm_up_call(monkeypatch) -> None:
    """Each turn has a single call that isn't counted."""
    monkeypatch.setattr(latencies, "WARMUP_MS", 0)


class CallRecorder:
    """Runners that record each call's runner, input length and number of PyTorch threads."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, int]] = []

    def runner(self, name: str):
        def run(batch) -> None:
            self.seen.append((name, batch["input_ids"].shape[1], torch.get_num_threads()))

        return run

    def runners(self) -> dict:
        return {name: self.runner(name) for name in NAMES}


# --- latency


@pytest.mark.usefixtures("one_warm_up_call")
@pytest.mark.parametrize(("rounds", "warmup"), [(1, 0), (3, 1), (2, 2)])
def test_every_runner_gets_the_same_calls_and_each_call_is_reported(rounds, warmup):
    calls, counts = CallRecorder(), []
    found = measure_latency(calls.runners(), INPUTS, rounds=rounds, warmup=warmup, on_calls=counts.append)
    assert list(found) == list(NAMES)
    assert {one.repeats for one in found.values()} == {rounds * len(LENGTHS)}
    count = Counter((name, length) for name, length, _ in calls.seen)
    each = dict.fromkeys(LENGTHS, rounds + warmup) | {LENGTHS[0]: 2 * (rounds + warmup)}  # warms up its block
    assert count == {(name, length): times for name in NAMES for length, times in each.items()}
    assert counts == [len(LENGTHS)] * len(NAMES) * (rounds + warmup)


@pytest.mark.usefixtures("one_warm_up_call")
def test_runners_alternate_in_blocks_and_take_every_position_equally_often():
    calls, count = CallRecorder(), 3 * TEXTS_PER_TURN
    texts = [{"input_ids": np.full((1, length), 1)} for length in range(1, count + 1)]
    measure_latency(calls.runners(), dict.fromkeys(NAMES, texts), rounds=3, warmup=0)
    turns = [calls.seen[i : i + TEXTS_PER_TURN + 1] for i in range(0, len(calls.seen), TEXTS_PER_TURN + 1)]
    assert all(len({name for name, *_ in turn}) == 1 for turn in turns), "a model is alone within a block"
    assert all(turn[0] == turn[1] for turn in turns), "and warms up on its first text"
    starts = [turn[0][1] for turn in turns]
    assert starts == 3 * [first for first in (1, 1 + TEXTS_PER_TURN, 1 + 2 * TEXTS_PER_TURN) for _ in NAMES], (
        "models take turns"
    )
    names = [turn[0][0] for turn in turns]
    for position in range(3):  # each model is first, second and third equally often
        assert Counter(names[position::3]) == dict.fromkeys(NAMES, 3)
    first = {start: {names[i] for i in range(0, len(turns), 3) if starts[i] == start} for start in starts}
    assert all(len(models) == 3 for models in first.values()), "and so on every block"


def test_quantiles_are_computed_from_the_durations_of_the_calls_alone(clock):
    durations = iter([9, 0.001, 0.002, 0.003, 0.010, 0.004])
    batches = [{"input_ids": np.zeros((4, length), np.int64)} for length in (5, 9, 9, 8, 30)]
    runners = {"only": lambda batch: clock.work(next(durations))}
    # The callback after a turn takes time too, which must not count towards a call.
    measured = measure_latency(
        runners, {"only": batches}, rounds=1, warmup=0, threads=2, on_calls=lambda count: clock.work(5)
    )
    latency = measured["only"]
    wanted = Latency(batch=4, length=9, threads=2, repeats=5, median_ms=3.0, p10_ms=1.4, p90_ms=7.6, best_ms=3.0)
    assert asdict(latency) == pytest.approx(asdict(wanted))


def test_the_best_latency_is_the_median_of_per_text_minima(clock):
    durations = iter([1, 0.002, 0.005, 1, 0.009, 0.004, 1, 0.003, 0.010])
    batches = [{"input_ids": np.zeros((1, length), np.int64)} for length in (5, 9)]
    latency = measure_latency(
        {"only": lambda batch: clock.work(next(durations))}, {"only": batches}, rounds=3, warmup=0
    )["only"]
    assert latency.best_ms == pytest.approx(3.0), "of 2 and 4"
    assert latency.median_ms == pytest.approx(4.5), "of 2, 3, 4, 5, 9 and 10"
    assert latency.repeats == 6


def test_each_model_gets_its_own_inputs():
    calls, longer = CallRecorder(), [{"input_ids": np.full((2, length + 1), 1)} for length in LENGTHS]
    measured = measure_latency(calls.runners(), INPUTS | {"student": longer}, rounds=2, warmup=0)
    assert {length for name, length, _ in calls.seen if name == "student"} == {length + 1 for length in LENGTHS}
    assert {length for name, length, _ in calls.seen if name != "student"} == set(LENGTHS)
    assert (measured["student"].length, measured["teacher"].length) == (7, 6)


def test_times_are_attributed_to_the_right_model(clock):
    times = {"slow": 0.004, "quick": 0.001, "middle": 0.002}
    runners = {name: lambda batch, seconds=seconds: clock.work(seconds) for name, seconds in times.items()}
    measured = measure_latency(runners, dict.fromkeys(times, TEXTS), rounds=3)
    for name, seconds in times.items():
        latency = measured[name]
        assert [latency.p10_ms, latency.median_ms, latency.p90_ms] == pytest.approx([seconds * 1e3] * 3)


def test_quantiles_of_real_times_are_positive_and_ordered():
    for one in measure_latency(CallRecorder().runners(), INPUTS, rounds=5).values():
        assert 0 < one.p10_ms <= one.median_ms <= one.p90_ms


def test_a_model_warms_up_on_its_texts_for_ten_milliseconds_in_each_turn(clock):
    seen: list[int] = []

    def run(batch) -> None:
        seen.append(batch["input_ids"].shape[1])
        clock.work(0.003)

    measured = measure_latency({"only": run}, {"only": TEXTS[:3]}, rounds=2, warmup=0)["only"]
    warm_up = [*LENGTHS[:3], LENGTHS[0]]  # 3, 6, 9 and 12 milliseconds
    assert seen == 2 * [*warm_up, *LENGTHS[:3]]
    assert measured.repeats == 6


@pytest.mark.usefixtures("one_warm_up_call")
def test_warmup_calls_are_not_counted(clock):
    calls = iter(range(4 * (len(TEXTS) + 1)))
    cold = {"cold": lambda batch: clock.work(9 if next(calls) < len(TEXTS) + 1 else 0.002)}
    assert measure_latency(cold, {"cold": TEXTS}, rounds=3, warmup=1)["cold"].p90_ms == pytest.approx(2)
    assert next(calls, None) is None


def test_the_thread_count_is_restored_after_success_and_failure():
    before = torch.get_num_threads()
    calls = CallRecorder()
    measure_latency(calls.runners(), INPUTS, rounds=1, threads=before + 1)
    assert {threads for *_, threads in calls.seen} == {before + 1}
    assert torch.get_num_threads() == before

    def broken(batch) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        measure_latency(calls.runners() | {"broken": broken}, INPUTS | {"broken": TEXTS}, rounds=1, threads=before + 1)
    assert torch.get_num_threads() == before
    with limit_torch_threads(before + 2):
        assert torch.get_num_threads() == before + 2
    assert torch.get_num_threads() == before


# --- memory


@pytest.mark.parametrize(("system", "unit"), [("linux", 1024), ("darwin", 1)])
def test_without_proc_the_peak_is_read_in_the_units_of_the_system(system, unit, monkeypatch):
    def missing(self) -> str:
        raise FileNotFoundError(self)

    monkeypatch.setattr(Path, "read_text", missing)
    monkeypatch.setattr(memory.sys, "platform", system)
    largest = memory.resource.getrusage(memory.resource.RUSAGE_SELF).ru_maxrss
    assert memory.read_peak_memory() == pytest.approx(largest * unit, rel=0.1)


# --- precision

CPU = torch.device("cpu")
IDS = torch.arange(5, 45).reshape(4, 10)


def squares(model: torch.nn.Module) -> torch.Tensor:
    return model(input_ids=IDS, attention_mask=torch.ones_like(IDS)).logits.float().square().mean()


@pytest.mark.parametrize("gathered", [False, True])
def test_timing_a_precision_leaves_weights_and_gradients_unchanged(gathered):
    model = build_model("bert").train()
    if gathered:  # gradients of an accumulation in progress
        squares(model).backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    seconds = measure_modes(model, [squares], ("32", "bf16-mixed"), steps=2)
    assert list(seconds) == ["32", "bf16-mixed"]
    assert all(value > 0 for value in seconds.values())
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for name, p in model.named_parameters():
        assert p.grad is None if grads[name] is None else torch.equal(p.grad, grads[name])


def test_models_with_frozen_parameters_can_be_timed():
    model = build_model("bert")
    model.base_model.requires_grad_(False)
    assert set(measure_modes(model, [squares], list_candidate_modes(CPU), steps=1)) == set(list_candidate_modes(CPU))


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({"32": 1.0, "bf16-mixed": 0.95}, "32"),
        ({"32": 1.0, "bf16-mixed": 0.8}, "bf16-mixed"),
        ({"32": 0.8, "bf16-mixed": 1.0}, "32"),
        ({"bf16-mixed": 1.0, "16-mixed": 0.99}, "16-mixed"),
    ],
)
def test_a_lower_precision_replaces_float32_only_by_a_clear_margin(seconds, chosen):
    assert choose_fastest_mode(seconds) == chosen


class Paced:
    """A loss that takes `full` seconds in float32 and `mixed` seconds under autocast, and counts its calls."""

    def __init__(self, clock: Clock, full: float, mixed: float):
        self.clock, self.seconds = clock, {False: full, True: mixed}
        self.calls = {False: 0, True: 0}

    def __call__(self, model: torch.nn.Module) -> torch.Tensor:
        mixed = torch.is_autocast_cpu_enabled()
        self.calls[mixed] += 1
        self.clock.work(self.seconds[mixed])
        return model.weight.square().sum()


@pytest.mark.parametrize(("mixed", "calls"), [(0.01, 4), (0.02, 4), (0.05, 4), (0.07, 1), (9.0, 1)])
def test_only_a_hopelessly_slow_precision_is_abandoned_after_its_first_step(clock, mixed, calls):
    loss = Paced(clock, 0.02, mixed)
    seconds = measure_modes(torch.nn.Linear(2, 2), [loss], ("32", "bf16-mixed"), steps=3)
    assert loss.calls == {False: 4, True: calls}
    assert seconds == pytest.approx({"32": 0.02, "bf16-mixed": mixed})
    assert calls == (1 if mixed > MAX_SLOWDOWN * 0.02 else 4)


def test_the_median_step_time_ignores_a_slow_first_step(clock):
    waits = iter([0.2, 0.001, 0.009, 0.002])

    def loss(model: torch.nn.Module) -> torch.Tensor:
        clock.work(next(waits))
        return model.weight.sum()

    assert measure_modes(torch.nn.Linear(2, 2), [loss], ("32",), steps=3) == pytest.approx({"32": 0.002})


def test_precision_names_select_autocast_types_and_device_candidates(monkeypatch):
    assert list_candidate_modes(CPU) == ("32", "bf16-mixed")
    with autocast_to_mode("32", CPU):
        assert not torch.is_autocast_cpu_enabled()
    with autocast_to_mode("bf16-mixed", CPU):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    cuda = torch.device("cuda")
    for supported, version, wanted in (
        (True, (9, 0), ("bf16-mixed", "fp8")),
        (True, (8, 0), ("bf16-mixed",)),
        (False, (7, 5), ("16-mixed",)),
    ):
        monkeypatch.setattr(precision_modes.torch.cuda, "is_bf16_supported", lambda supported=supported: supported)
        monkeypatch.setattr(
            precision_modes.torch.cuda, "get_device_capability", lambda device, version=version: version
        )
        assert list_candidate_modes(cuda) == ("32", *wanted)


# --- the machine

CPUINFO = """processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Some Processor: 2.10GHz
flags\t\t: fpu sse2 avx2 avx512f avx512_bf16

processor\t: 1
model name\t: Some Processor: 2.10GHz
flags\t\t: fpu sse2 avx2 avx512f avx512_bf16
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems tell neither a process's cores nor /proc/cpuinfo")
def test_the_machine_description_is_stable_and_names_the_processor(monkeypatch):
    described = this_machine.describe_machine()
    assert described["cores"] == len(os.sched_getaffinity(0)) <= (os.cpu_count() or 1)
    assert described["platform"] == platform.platform()
    assert described["processor"]
    assert described == this_machine.describe_machine(), "a key of stages has to stay the same"
    monkeypatch.setattr(Path, "read_text", lambda self: CPUINFO)
    assert this_machine.find_processor() == "Some Processor: 2.10GHz (avx2, avx512f, avx512_bf16)"


def test_a_machine_without_cpuinfo_falls_back_to_platform_names(monkeypatch):
    def missing(self) -> str:
        raise FileNotFoundError(self)

    monkeypatch.setattr(Path, "read_text", missing)
    assert this_machine.find_processor() == (platform.processor() or platform.machine())
    monkeypatch.setattr(Path, "read_text", lambda self: "processor\t: 0\nBogoMIPS\t: 50.00\n")
    assert this_machine.find_processor().startswith(platform.machine())


def test_the_commit_is_that_of_the_packages_own_checkout_or_none(monkeypatch, tmp_path):
    head = this_machine.find_commit()
    assert head is None or (len(head) >= 7 and set(head) <= set("0123456789abcdef"))
    monkeypatch.setattr(this_machine, "__file__", str(tmp_path / "pipelines" / "settings" / "this_machine.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert this_machine.find_commit() is None
