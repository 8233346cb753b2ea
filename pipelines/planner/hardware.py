"""The machines that a training is planned for, and the time that a traced step takes on them.

A step computes and sends at the same time as far as the layout allows: FSDP gathers the next layer's weights and
replicas sum gradients while they compute, tensor parallelism waits for each sum. A collective over n processes sends
(n - 1) / n of its bytes through each process's link, an all-reduce twice that (Thakur et al. 2005, Optimization of
Collective Communication Operations in MPICH, ring algorithms); the slowest link of the ring decides.
"""

import math
from dataclasses import dataclass

from pipelines.planner.operator_counter import BROADCAST, Collective, OperatorWork
from pipelines.planner.trace import StepTrace

OVERLAP = 0.9  # share of the computation during which the link is free to send


@dataclass(frozen=True)
class Hardware:
    """Some nodes of equal devices.

    Args:
        nodes: Number of machines.
        devices: GPUs of each, or processes on its CPU.
        memory: Bytes of each device for tensors.
        flops: Floating-point operations a second that products reach on a device.
        links: Bytes a second that a device sends to others of its node.
        bandwidth: Bytes a second that a device sends to those of other nodes.
        latency: Seconds that a collective takes in addition.
        memory_bandwidth: Bytes a second that operators other than products read and write; infinite where `flops` is
            that of whole trainings, which include them.
        draws: Random numbers a second, for dropout; infinite likewise.
        dispatch: Seconds that an operator on a sharded tensor takes in addition.
        can_overlap: Whether sending leaves the device free to compute; a CPU does both itself.
        host_link: Bytes a second between a device and the CPU's memory: what is usually reached of PCIe 4 x16.
        host_memory: Bytes a second that the CPU of a node reads and writes.
    """

    nodes: int
    devices: int
    memory: int
    flops: float
    links: float
    bandwidth: float
    latency: float = 20e-6
    memory_bandwidth: float = math.inf
    draws: float = math.inf
    dispatch: float = 0.0
    can_overlap: bool = True
    host_link: float = 20e9
    host_memory: float = 100e9

    @property
    def processes(self) -> int:
        """Number of devices."""
        return self.nodes * self.devices

    @property
    def backend(self) -> str:
        """What processes send with."""
        return "nccl" if self.can_overlap else "gloo"

    def find_speed(self, ranks: tuple[int, ...]) -> float:
        """Returns the bytes a second between processes, whose numbers fill nodes one after the other."""
        is_within_node = len({rank // self.devices for rank in ranks}) == 1
        return self.links if is_within_node else self.bandwidth


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step.

    Args:
        compute: Of the operators.
        waited: Of sending what the computation waits for, such as sums in tensor parallelism.
        beside: Of sending what may be sent beside the computation: weights and gradients.
        exposed: The part of these that isn't hidden behind the computation.
        idle: Of waiting for other pipeline stages.
    """

    compute: float
    waited: float
    beside: float
    exposed: float
    idle: float = 0.0

    @property
    def total(self) -> float:
        """Seconds in all."""
        return self.compute + self.waited + self.exposed + self.idle


def estimate_step(trace: StepTrace, hardware: Hardware) -> StepTime:
    """Returns the time of a traced step."""
    compute = time_operators(trace.work, hardware)
    seconds = {
        each: count_sent(each, size, hardware.backend) / hardware.find_speed(each.ranks)
        + hardware.latency * (1 if each.kind == BROADCAST else trace.calls[each])  # processes wait before the first
        for each, size in trace.sent.items()
        if len(each.ranks) > 1
    }
    waited = sum(spent for each, spent in seconds.items() if each.waits)
    beside = sum(seconds.values()) - waited
    hidden = OVERLAP * compute if hardware.can_overlap else 0.0
    idle = (trace.stretch - 1) * (compute + waited)
    return StepTime(compute, waited, beside, max(0.0, beside - hidden), idle)


def time_operators(work: OperatorWork, hardware: Hardware) -> float:
    """Returns the seconds that operators take, but for what they send."""
    computed = work.flops / hardware.flops + work.bytes_accessed / hardware.memory_bandwidth
    return computed + work.drawn / hardware.draws + work.sharded * hardware.dispatch


def estimate_offload(trace: StepTrace, hardware: Hardware) -> float:
    """Returns the seconds that a step takes longer with weights, gradients and states in the CPU's memory.

    Weights go to the device for the forward and for the backward pass, gradients come back; AdamW then reads and writes
    weights, gradients and both moments on the CPU, whose memory the devices of a node share.
    """
    weights = trace.held_bytes - trace.memory.get("optimizer", 0)
    updates = (2 * trace.held_bytes + weights) * hardware.devices
    return 3 * weights / hardware.host_link + updates / hardware.host_memory


def count_sent(collective: Collective, size: int, backend: str = "nccl") -> float:
    """Returns the bytes through a process's link for a collective with this many bytes of results.

    A broadcast passes through all links whole, and those of ZeRO 1 follow one another. gloo's reduce-scatter is an
    all-reduce of its input, of which each process keeps its part.
    """
    kind, processes = collective.kind, len(collective.ranks)
    if kind in ("send", BROADCAST):
        return size
    if kind.startswith("reduce_scatter"):
        return (2 if backend == "gloo" else 1) * size * (processes - 1)
    rounds = 2 if kind.replace("_", "").startswith("allreduce") else 1
    return rounds * size * (processes - 1) / processes
