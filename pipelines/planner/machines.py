"""The machines of a plan: from data sheets, or measured on this one."""

import os
from dataclasses import replace

import torch

from compress.measure.memory import read_resident_memory
from compress.prune.budget import parse_bytes
from pipelines.planner.hardware import Hardware
from pipelines.planner.processor_rates import measure_processor
from pipelines.settings.commands.plan import CPU, GPU_KINDS, REACHED, ClusterConfig, GpuKind, parse_rate
from pipelines.settings.layouts import process_memory, read_memory

RESERVED = 10**9  # bytes of a GPU for its context, NCCL's buffers and workspaces of products, approximately


def describe_hardware(cluster: ClusterConfig, precision: str, threads: int) -> Hardware:
    """Returns the machines of a plan.

    Args:
        cluster: The machines as requested.
        precision: Precision of training.
        threads: Threads of a process, for a CPU.
    """
    hardware = measure_this_processor(cluster, threads) if cluster.gpu == CPU else describe_gpus(cluster, precision)
    return replace(
        hardware,
        flops=cluster.tflops * 1e12 or hardware.flops,
        links=parse_rate(cluster.links, "cluster.links") if cluster.links else hardware.links,
        bandwidth=parse_rate(cluster.bandwidth, "cluster.bandwidth"),
    )


def describe_gpus(cluster: ClusterConfig, precision: str) -> Hardware:
    """Returns machines with GPUs, from their data sheet."""
    kind = GPU_KINDS[cluster.gpu]
    memory = parse_bytes(cluster.gpu_memory, "cluster.gpu_memory") if cluster.gpu_memory else kind.memory
    rate = look_up_flops(kind, precision)
    return Hardware(cluster.nodes, cluster.gpus, memory - RESERVED, rate, kind.links, kind.links)


def measure_this_processor(cluster: ClusterConfig, threads: int) -> Hardware:
    """Returns machines like this one, with processes in place of GPUs."""
    rates = measure_processor(cluster.gpus, threads)
    memory = read_memory() // cluster.gpus
    if cluster.gpu_memory:
        memory = parse_bytes(cluster.gpu_memory, "cluster.gpu_memory")
    return Hardware(
        cluster.nodes, cluster.gpus, memory - rates.resident, rates.flops, rates.bandwidth, rates.bandwidth,
        rates.latency, rates.memory_bandwidth, rates.draws, rates.dispatch, can_overlap=False,
    )  # fmt: skip


def describe_this_machine(processes: int, precision: str) -> Hardware:
    """Returns this machine, and others like it, as hardware of a run with this many processes in this precision.

    A GPU that isn't in the table counts as an A100 with its own memory. The rates of a CPU are assumed, since measuring
    them would delay every start: only their ratios matter for the choice of a layout.
    """
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    nodes, memory = max(1, processes // per_node), int(process_memory(processes))
    bandwidth = parse_rate(ClusterConfig().bandwidth, "cluster.bandwidth")
    if not torch.cuda.is_available():
        free = memory - read_resident_memory()
        return Hardware(
            nodes, per_node, free, 50e9, 1e9, 1e9,
            latency=1e-3, memory_bandwidth=6e9, draws=1e8, dispatch=200e-6, can_overlap=False,
        )  # fmt: skip
    name = torch.cuda.get_device_name().lower()
    kind = GPU_KINDS[next((kind for kind in GPU_KINDS if kind in name.replace("-", " ").split()), "a100")]
    return Hardware(nodes, per_node, memory - RESERVED, look_up_flops(kind, precision), kind.links, bandwidth)


def look_up_flops(kind: GpuKind, precision: str) -> float:
    """Returns the floating-point operations a second that a training in this precision reaches."""
    return REACHED * (kind.single if precision == "32" else kind.half)
