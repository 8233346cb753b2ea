"""The time of a step by arithmetic."""

import pytest

from distill.parallel.layout import Layout
from pipelines.planner.hardware import Hardware, estimate_step

TWO_NODES = Hardware(nodes=2, gpus=4, memory=80 * 10**9, flops=1e12, bandwidth=100e9, network=10e9)


def test_a_lone_process_only_computes():
    found = estimate_step(2 * 10**12, {}, Layout(), TWO_NODES)
    assert found.total == found.compute == 2


def test_gathered_weights_hide_behind_the_computation_until_it_is_over():
    layout = Layout(fsdp=4)
    quick = estimate_step(10**12, {"allgather_base": 40 * 10**9}, layout, TWO_NODES)
    assert quick.sharded == pytest.approx(0.3)
    assert quick.total == 1
    slow = estimate_step(10**12, {"allgather_base": 400 * 10**9}, layout, TWO_NODES)
    assert slow.total == pytest.approx(1 + 3 - 0.9)


def test_across_nodes_the_network_decides():
    sent = {"reduce_scatter_base": 10**9}
    near, far = (estimate_step(0, sent, Layout(fsdp=count), TWO_NODES).sharded for count in (4, 8))
    assert near == pytest.approx(3 / 100)
    assert far == pytest.approx(7 / 10)


def test_sums_of_products_are_waited_for():
    found = estimate_step(10**12, {"all_reduce": 100 * 10**9}, Layout(tp=4), TWO_NODES)
    assert found.products == pytest.approx(1.5)
    assert found.total == pytest.approx(2.5)
    assert found.sharded == 0
