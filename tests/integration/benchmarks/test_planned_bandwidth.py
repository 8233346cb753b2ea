"""What the planner says a process sends in a step, against what goes through a cable between two machines."""

import pytest

from benchmarks.distributed.planned_bandwidth import measure_layout, parse_options
from benchmarks.distributed.two_machines import can_make_namespaces

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
HEADERS = 0.02  # of packets, and barriers


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    if not can_make_namespaces():
        pytest.skip("network namespaces can't be made here: no root, no `ip` or `tc`, or a container without the right")
    return tmp_path_factory.mktemp("bandwidth")


@pytest.mark.parametrize("layout", ["replicated", "fsdp=2", "tp=2"])
def test_a_process_sends_the_bytes_that_the_planner_counts(layout, output):
    options = parse_options(["--output", str(output), "--rates", "1Gbit/s", "--rounds", "1"])
    (found,) = measure_layout(layout, options)
    assert found.predicted_bytes == pytest.approx(found.sent_bytes, rel=HEADERS)
    assert found.predicted_seconds == pytest.approx(found.predicted_bytes / 125e6)


def test_the_broadcasts_of_zero_1_are_waited_for_one_after_the_other(output):
    options = parse_options(["--output", str(output), "--rates", "1Gbit/s", "--rounds", "1"])
    (replicas,), (shards,) = (measure_layout(name, options) for name in ("replicated", "zero1"))
    weights = replicas.predicted_bytes  # of two processes, an all-reduce sends as much as there is
    assert shards.predicted_bytes == pytest.approx(2 * weights, rel=HEADERS)
    assert weights < shards.sent_bytes < shards.predicted_bytes
