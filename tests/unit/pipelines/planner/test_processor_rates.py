"""The rates of this machine's CPU."""

from dataclasses import asdict

import pytest

from pipelines.planner.processor_rates import measure_processor


@pytest.mark.slow  # starts processes
@pytest.mark.parametrize("processes", [1, 2])
def test_all_rates_of_a_processor_are_measured(processes):
    rates = asdict(measure_processor(processes, 1))
    sending = {name: rates.pop(name) for name in ("bandwidth", "latency", "dispatch")}
    assert all(value > 0 for value in rates.values())
    if processes == 1:
        assert sending == {"bandwidth": 1, "latency": 0, "dispatch": 0}
    else:
        assert sending["bandwidth"] > 1
