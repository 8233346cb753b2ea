"""The time of a step by arithmetic."""

from dataclasses import replace

import pytest

from pipelines.planner.hardware import Hardware, StepTime, estimate_step
from pipelines.planner.operator_counter import Collective, OperatorWork
from pipelines.planner.trace import StepTrace

TWO_NODES = Hardware(nodes=2, devices=4, memory=80 * 10**9, flops=1e12, links=100e9, bandwidth=10e9, latency=0)


def estimate(flops: int, kind: str, size: int, ranks: range, *, waits: bool = False, **changed: object) -> StepTime:
    collective = Collective(kind, tuple(ranks), waits)
    return estimate_step(
        StepTrace({}, 0, OperatorWork(flops), {collective: size}, {collective: 1}), replace(TWO_NODES, **changed)
    )


def test_a_lone_process_only_computes():
    found = estimate_step(StepTrace({}, 0, OperatorWork(2 * 10**12), {}, {}), TWO_NODES)
    assert found.total == found.compute == 2


def test_gathering_weights_overlaps_with_the_computation_until_its_end():
    quick = estimate(10**12, "allgather_base", 40 * 10**9, range(4))
    assert quick.beside == pytest.approx(0.3)
    assert quick.total == 1
    slow = estimate(10**12, "allgather_base", 400 * 10**9, range(4))
    assert slow.total == pytest.approx(1 + 3 - 0.9)


def test_operators_take_the_time_of_their_bytes_and_of_their_dispatch_where_rates_are_those_of_products():
    trace = StepTrace({}, 0, OperatorWork(10**12, bytes_accessed=10**9, drawn=10**7, sharded=100), {}, {})
    assert estimate_step(trace, TWO_NODES).total == 1
    processor = replace(TWO_NODES, memory_bandwidth=2e9, dispatch=1e-3, draws=1e8)
    assert estimate_step(trace, processor).compute == pytest.approx(1 + 0.5 + 0.1 + 0.1)


def test_communication_that_cannot_overlap_adds_its_whole_time():
    found = estimate(10**12, "allgather_base", 40 * 10**9, range(4), can_overlap=False)
    assert found.total == pytest.approx(1.3)


def test_across_nodes_the_network_bandwidth_determines_the_time():
    near, far = (estimate(0, "reduce_scatter_base", 10**9, ranks).beside for ranks in (range(4), range(8)))
    assert near == pytest.approx(3 / 100)
    assert far == pytest.approx(7 / 10)
    assert estimate(0, "reduce_scatter_base", 10**9, range(0, 8, 4)).beside == pytest.approx(1 / 10)


def test_a_collective_that_waits_does_not_overlap():
    found = estimate(10**12, "all_reduce", 100 * 10**9, range(4), waits=True)
    assert found.waited == pytest.approx(1.5)
    assert found.total == pytest.approx(2.5)
    assert found.beside == 0


def test_every_collective_call_adds_the_latency():
    collective = Collective("all_reduce", (0, 1), waits=True)
    found = estimate_step(
        StepTrace({}, 0, OperatorWork(), {collective: 0}, {collective: 100}), replace(TWO_NODES, latency=1e-3)
    )
    assert found.total == pytest.approx(0.1)


def test_broadcasts_that_follow_one_another_wait_once():
    collective = Collective("broadcast", (0, 1), waits=True)
    found = estimate_step(
        StepTrace({}, 0, OperatorWork(), {collective: 0}, {collective: 100}), replace(TWO_NODES, latency=1e-3)
    )
    assert found.total == pytest.approx(1e-3)


def test_a_pipeline_waits_for_its_ends():
    found = estimate_step(StepTrace({}, 0, OperatorWork(10**12), {}, {}, stretch=7 / 4), TWO_NODES)
    assert found.idle == pytest.approx(0.75)
    assert found.total == pytest.approx(1.75)


def test_a_broadcast_takes_the_time_of_one_transfer_of_the_whole_tensor():
    assert estimate(0, "broadcast", 10**9, range(4)).beside == pytest.approx(1 / 100)


def test_a_reduce_scatter_of_gloo_sends_as_much_as_an_all_reduce():
    scattered = estimate(0, "reduce_scatter_base", 10**9, range(4), can_overlap=False)
    assert scattered.beside == estimate(0, "all_reduce", 4 * 10**9, range(4), can_overlap=False).beside


def test_a_message_takes_the_time_of_one_transfer():
    assert estimate(0, "send", 10**9, range(2), waits=True).waited == pytest.approx(1 / 100)
