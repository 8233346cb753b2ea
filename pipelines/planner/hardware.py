"""The machines that a training is planned for, and the time that a traced step takes on them.

A step computes and sends at the same time as far as the layout allows: FSDP gathers the next layer's weights and sums
gradients while it computes, tensor parallelism waits for each sum. A collective over n processes sends (n - 1) / n of
its bytes through each process's link, an all-reduce twice that (Thakur et al. 2005, Optimization of Collective
Communication Operations in MPICH, ring algorithms).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from distill.parallel.layout import Layout

OVERLAP = 0.9  # share of the computation during which the link is free to send


@dataclass(frozen=True)
class Hardware:
    """Some nodes of equal GPUs.

    Args:
        nodes: Number of machines.
        gpus: GPUs of each.
        memory: Bytes of each GPU.
        flops: Floating-point operations a second that products reach on a GPU.
        bandwidth: Bytes a second that a GPU sends to others of its node.
        network: Bytes a second that a GPU sends to those of other nodes.
    """

    nodes: int
    gpus: int
    memory: int
    flops: float
    bandwidth: float
    network: float

    @property
    def processes(self) -> int:
        """Number of GPUs."""
        return self.nodes * self.gpus

    def find_speed(self, group: int) -> float:
        """Returns the bytes a second between the processes of a group, which fills nodes one after the other."""
        return self.bandwidth if group <= self.gpus else self.network


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step.

    Args:
        compute: Of the products.
        sharded: Of sending weights and gradients, in all.
        products: Of sending parts of products, for which the computation waits.
        exposed: Of sending weights and gradients, as far as it isn't hidden behind the computation.
    """

    compute: float
    sharded: float
    products: float
    exposed: float

    @property
    def total(self) -> float:
        """Seconds in all."""
        return self.compute + self.products + self.exposed


def estimate_step(flops: int, sent: Mapping[str, int], layout: Layout, hardware: Hardware) -> StepTime:
    """Returns the time of a step.

    Args:
        flops: Of a process.
        sent: Kind of collective -> bytes of its results, as in `StepTrace`.
        layout: Says how many processes a collective is over.
        hardware: The machines.
    """
    compute = flops / hardware.flops
    tensors = hardware.find_speed(layout.tp)
    replicas = layout.dp * layout.fsdp
    data = hardware.find_speed(replicas * layout.tp)
    products = sum(_count_sent(kind, size, layout.tp) / tensors for kind, size in sent.items() if kind in _OF_PRODUCTS)
    sharded = sum(
        _count_sent(kind, size, layout.fsdp if layout.fsdp > 1 else replicas) / data
        for kind, size in sent.items()
        if kind not in _OF_PRODUCTS
    )
    return StepTime(compute, sharded, products, max(0.0, sharded - OVERLAP * compute))


_OF_PRODUCTS = ("all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor")  # DTensor's; the others are FSDP's


def _count_sent(kind: str, size: int, processes: int) -> float:
    """Returns the bytes through a process's link for a collective with this many bytes of results."""
    if kind.startswith("reduce_scatter"):
        return size * (processes - 1)
    rounds = 2 if kind.replace("_", "").startswith("allreduce") else 1
    return rounds * size * (processes - 1) / processes
