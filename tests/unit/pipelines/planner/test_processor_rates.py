"""The rates of this machine's CPU, and the order in which they are measured."""

from dataclasses import asdict

import pytest
import torch.distributed as dist

from pipelines.planner.processor_rates import TIMED_ROUNDS, measure_processor, time_in_turns


def test_works_are_timed_in_turns(tmp_path):
    order = []
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        seconds = time_in_turns({"one": lambda: order.append("one"), "other": lambda: order.append("other")})
    finally:
        dist.destroy_process_group()
    assert order == (1 + TIMED_ROUNDS) * ["one", "other"]
    assert set(seconds) == {"one", "other"}


@pytest.mark.slow  # starts processes
@pytest.mark.parametrize("processes", [1, 2])
def test_all_rates_of_a_processor_are_measured(processes):
    found = asdict(measure_processor(processes, 1))
    sending = {name: found.pop(name) for name in ("bandwidth", "latency", "dispatch")}
    assert all(value > 0 for value in found.values())
    if processes == 1:
        assert sending == {"bandwidth": 1, "latency": 0, "dispatch": 0}
    else:
        assert sending["bandwidth"] > 1
