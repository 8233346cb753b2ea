"""The machines of a plan: from data sheets, or measured on this one."""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from compress.measure.memory import read_resident_memory
from compress.prune.budget import parse_bytes
from pipelines.planner.hardware import Hardware
from pipelines.planner.operator_counter import WorkCounter
from pipelines.settings.commands.plan import CPU, GPU_KINDS, REACHED, ClusterConfig, GpuKind, parse_rate
from pipelines.settings.layouts import process_memory, read_memory

ROWS, WIDTH = 1024, 768  # of the products that are timed: tokens of a batch, and units of BERT's layers
MESSAGE = 16 << 20  # bytes of the sums that are timed
SEGMENT_ROWS = 64  # of the products between which processes wait for each other
REPEATED = 20  # short operations that are timed together
TIMED_ROUNDS = 5
RESERVED = 10**9  # bytes of a GPU for its context, NCCL's buffers and workspaces of products, approximately


def describe_hardware(cluster: ClusterConfig, precision: str, threads: int) -> Hardware:
    """Returns the machines of a plan.

    Args:
        cluster: The machines as requested.
        precision: Precision of training.
        threads: Threads of a process, for a CPU.
    """
    found = measure_this_processor(cluster, threads) if cluster.gpu == CPU else describe_gpus(cluster, precision)
    return replace(
        found,
        flops=cluster.tflops * 1e12 or found.flops,
        links=parse_rate(cluster.links, "cluster.links") if cluster.links else found.links,
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
        rates.latency, rates.memory_bandwidth, rates.dispatch, can_overlap=False,
    )  # fmt: skip


@dataclass(frozen=True)
class ProcessorRates:
    """What processes on this machine reach while all of them work.

    Args:
        flops: Floating-point operations a second of a process.
        resident: Bytes of a process before it has tensors.
        memory_bandwidth: Bytes a second that operators between products read and write.
        bandwidth: Bytes a second between two of them; 1 for a lone process.
        latency: Seconds of a sum of one number between products, for which the first process waits for the last.
        dispatch: Seconds that an operator on a sharded tensor takes longer than on another.
    """

    flops: float
    resident: int
    memory_bandwidth: float
    bandwidth: float = 1.0
    latency: float = 0.0
    dispatch: float = 0.0


def measure_processor(processes: int, threads: int) -> ProcessorRates:
    """Returns the rates of this many processes that work at the same time, each with `threads` threads (0: default)."""
    with tempfile.TemporaryDirectory(prefix="stillroom-") as place:
        torch.multiprocessing.start_processes(
            _measure_process, (processes, threads, place), nprocs=processes, start_method="spawn"
        )
        found = [json.loads((Path(place) / f"{rank}.json").read_text()) for rank in range(processes)]
    return ProcessorRates(**{name: statistics.median(each[name] for each in found) for name in found[0]})


def _measure_process(rank: int, processes: int, threads: int, place: str) -> None:
    """Writes the rates of a process to a file."""
    torch.set_num_threads(threads or max(1, (os.cpu_count() or 1) // processes))
    dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=processes)
    resident = read_resident_memory()
    left, right = torch.randn(ROWS, WIDTH), torch.randn(WIDTH, 4 * WIDTH)
    product = time_work(lambda: left @ right)
    rates = ProcessorRates(2 * left.numel() * right.shape[1] / product, resident, measure_memory_bandwidth())
    if processes > 1:
        message = torch.zeros(MESSAGE // 4)
        shortest = time_work(lambda: dist.all_reduce(torch.zeros(1)))
        seconds = max(1e-9, time_work(lambda: dist.all_reduce(message)) - shortest)
        latency = measure_wait(left[:SEGMENT_ROWS], right)
        sent = 2 * MESSAGE * (processes - 1) / processes
        rates = replace(
            rates, bandwidth=sent / seconds, latency=latency, dispatch=measure_dispatch(processes, shortest)
        )
    (Path(place) / f"{rank}.json").write_text(json.dumps(asdict(rates)))
    dist.destroy_process_group()


def measure_memory_bandwidth() -> float:
    """Returns the bytes a second of what is between the products of a layer, forward and backward."""
    hidden = torch.randn(ROWS, 4 * WIDTH, requires_grad=True)
    weight = torch.ones(4 * WIDTH, requires_grad=True)

    def work() -> None:
        functional.dropout(functional.layer_norm(functional.gelu(hidden), weight.shape, weight), 0.1).sum().backward()

    with WorkCounter() as counter:
        work()
    rate: float = counter.bytes_accessed / time_work(work)
    return rate


def measure_wait(left: Tensor, right: Tensor) -> float:
    """Returns the seconds that a sum between products takes: processes drift apart while they compute."""

    def alternate(work: Callable[[], object]) -> None:
        for _ in range(REPEATED):
            _ = left @ right
            work()

    summed = time_work(partial(alternate, lambda: dist.all_reduce(torch.zeros(1))))
    return max(0.0, summed - time_work(partial(alternate, lambda: None))) / REPEATED


def measure_dispatch(processes: int, sum_seconds: float) -> float:
    """Returns the seconds that an operator on a sharded tensor takes longer than on another.

    Args:
        processes: Number of processes.
        sum_seconds: Of a sum over all of them.
    """
    width = 8 * processes
    plain, sharded = (nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)) for _ in range(2))
    mesh = init_device_mesh("cpu", (processes,))
    parallelize_module(sharded, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    inputs = torch.ones(1, width, requires_grad=True)

    def repeat(model: nn.Module) -> None:
        for _ in range(REPEATED):
            model(inputs).sum().backward()

    with WorkCounter() as counter:
        repeat(sharded)
    spent = time_work(partial(repeat, sharded)) - time_work(partial(repeat, plain))
    seconds: float = max(0.0, spent - sum(counter.calls.values()) * sum_seconds) / counter.sharded
    return seconds


def time_work(work: Callable[[], object]) -> float:
    """Returns the median seconds of a function on all processes at once, after a first call."""
    spent = []
    for _ in range(1 + TIMED_ROUNDS):
        dist.barrier()
        start = time.perf_counter()
        work()
        spent.append(time.perf_counter() - start)
    return statistics.median(spent[1:])


def describe_this_machine(processes: int, precision: str) -> Hardware:
    """Returns this machine, and others like it, as hardware of a run with this many processes in this precision.

    A GPU that isn't in the table counts as an A100 with its own memory. The rates of a CPU are assumed, since measuring
    them would delay every start: only their ratios matter for the choice of a layout.
    """
    here = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    nodes, memory = max(1, processes // here), int(process_memory(processes))
    bandwidth = parse_rate(ClusterConfig().bandwidth, "cluster.bandwidth")
    if not torch.cuda.is_available():
        free = memory - read_resident_memory()
        return Hardware(
            nodes, here, free, 50e9, 1e9, 1e9, latency=1e-3, memory_bandwidth=3e9, dispatch=200e-6, can_overlap=False
        )
    name = torch.cuda.get_device_name().lower()
    kind = GPU_KINDS[next((kind for kind in GPU_KINDS if kind in name.replace("-", " ").split()), "a100")]
    return Hardware(nodes, here, memory - RESERVED, look_up_flops(kind, precision), kind.links, bandwidth)


def look_up_flops(kind: GpuKind, precision: str) -> float:
    """Returns the floating-point operations a second that a training in this precision reaches."""
    return REACHED * (kind.single if precision == "32" else kind.half)
