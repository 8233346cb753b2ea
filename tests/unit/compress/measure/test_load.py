"""Tests how much other processes use a machine's processors while models are timed."""

import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from compress.measure import load
from compress.measure.load import ProcessorSeconds, start_counting
from compress.measure.process import open_timing_process
from support.clock import Clock


def write_stat(file: Path, busy: int, idle: int) -> None:
    """Writes a line of ticks; an eighth of the busy ones each are system, interrupt and steal time."""
    part = busy // 8
    file.write_text(f"cpu  {busy - 3 * part} 0 {part} {idle} 99 {part} 0 {part} 7 7\ncpu0 1 1 1 1 1 1 1 1 1 1\n")


def test_busy_seconds_of_others_are_those_of_all_without_its_own(tmp_path, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(load, "time", clock)
    monkeypatch.setattr(clock, "process_time", lambda: clock.perf_counter() / 4, raising=False)
    ticks = os.sysconf("SC_CLK_TCK")
    write_stat(tmp_path / "stat", busy=8 * ticks, idle=0)
    count = start_counting(tmp_path / "stat")
    clock.work(4.0)
    write_stat(tmp_path / "stat", busy=8 * ticks + 3 * ticks, idle=10 * ticks)
    found = count()
    assert (found.others, found.total) == (pytest.approx(2.0), pytest.approx(4.0 * os.cpu_count()))
    assert (found + found).share == found.share == pytest.approx(0.5 / os.cpu_count())


def test_nothing_is_known_where_the_system_does_not_say(tmp_path):
    assert start_counting(tmp_path / "missing")() == ProcessorSeconds()
    assert ProcessorSeconds().share is None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says how busy its processors are")
def test_a_process_that_runs_while_models_are_timed_is_seen():
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as spinning:
        try:
            with open_timing_process({"sleep": partial(partial, time.sleep)}, threads=1) as process:
                process.time_rounds({"sleep": [0.1] * 8}, rounds=1, warmup=0)
        finally:
            spinning.kill()
    assert process.processors.total == pytest.approx(0.9 * os.cpu_count(), rel=0.5)
    assert process.processors.share * os.cpu_count() > 0.3
