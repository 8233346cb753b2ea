"""What processes on this machine's CPU reach: measured with what a training does, while all of them work."""

import json
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from compress.measure.memory import read_resident_memory
from compress.measure.turns import time_in_turns
from pipelines.planner.operator_counter import WorkCounter

ROWS, WIDTH = 1024, 768  # of the products that are timed: tokens of a batch, and units of BERT's layers
MESSAGE = 16 << 20  # bytes of the sums that are timed
SEGMENT_ROWS = 64  # of the products between which processes wait for each other
REPEATED = 20  # short operations that are timed together
TIMED_ROUNDS = 9


@dataclass(frozen=True)
class ProcessorRates:
    """What a process reaches.

    Args:
        resident: Bytes of a process before it has tensors.
        flops: Floating-point operations a second of products.
        memory_bandwidth: Bytes a second that operators between products read and write.
        draws: Random numbers a second.
        bandwidth: Bytes a second between two processes; 1 for a lone process.
        latency: Seconds of a sum of one number between products, for which the first process waits for the last.
        dispatch: Seconds that an operator on a sharded tensor takes longer than on another.
    """

    resident: int
    flops: float
    memory_bandwidth: float
    draws: float
    bandwidth: float = 1.0
    latency: float = 0.0
    dispatch: float = 0.0


@dataclass(frozen=True)
class Work:
    """Something that is timed.

    Args:
        run: Does it.
        count: How much it does, in the unit of its rate.
        sums: Number of collectives that it waits for.
    """

    run: Callable[[], object]
    count: float = 1.0
    sums: int = 0


def measure_processor(processes: int, threads: int) -> ProcessorRates:
    """Returns the rates of this many processes that work at the same time, each with `threads` threads (0: default)."""
    with tempfile.TemporaryDirectory(prefix="stillroom-") as folder:
        torch.multiprocessing.start_processes(
            _measure_process, (processes, threads, folder), nprocs=processes, start_method="spawn"
        )
        rates = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(processes)]
    return ProcessorRates(**{name: statistics.median(each[name] for each in rates) for name in rates[0]})


def _measure_process(rank: int, processes: int, threads: int, folder: str) -> None:
    """Writes the rates of a process to a file."""
    torch.set_num_threads(threads or max(1, (os.cpu_count() or 1) // processes))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=processes)
    rates = measure_rates(processes)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(asdict(rates)))
    dist.destroy_process_group()


def measure_rates(processes: int) -> ProcessorRates:
    """Returns the rates of this process while all others of the process group measure theirs."""
    resident = read_resident_memory()
    works = build_compute() | (build_sending(processes) if processes > 1 else {})
    # In turns other programs slow all of them down alike: the ratios decide about a layout.
    times = time_in_turns({name: work.run for name, work in works.items()}, TIMED_ROUNDS, warmup=1, before=dist.barrier)
    seconds = {name: statistics.median(each) for name, each in times.items()}
    flops, memory_bandwidth, draws = (works[name].count / seconds[name] for name in ("product", "pointwise", "draw"))
    if processes == 1:
        return ProcessorRates(resident, flops, memory_bandwidth, draws)
    transfer = seconds["large sum"] - seconds["small sum"]
    latency = (seconds["products and sums"] - seconds["products"]) / REPEATED
    sharded = works["sharded layers"]
    dispatch = seconds["sharded layers"] - seconds["layers"] - sharded.sums * seconds["small sum"]
    return ProcessorRates(
        resident,
        flops,
        memory_bandwidth,
        draws,
        works["large sum"].count / max(1e-9, transfer),
        max(0.0, latency),
        max(0.0, dispatch) / sharded.count,
    )


def build_compute() -> dict[str, Work]:
    """Returns what a process computes.

    A product of a layer; what is between products, forward and backward, with an optimizer's step; random numbers.
    """
    left, right = torch.randn(ROWS, WIDTH), torch.randn(WIDTH, 4 * WIDTH)
    hidden = torch.randn(ROWS // 4, 4 * WIDTH, requires_grad=True)
    weight, layer = torch.ones(4 * WIDTH, requires_grad=True), torch.randn(WIDTH, 4 * WIDTH)
    layer.grad = torch.randn_like(layer)
    optimizer = torch.optim.AdamW([layer], fused=True)

    def work() -> None:
        normed = functional.layer_norm(hidden + functional.gelu(hidden), weight.shape, weight)
        torch.autograd.grad(normed.sum(), (hidden, weight))
        optimizer.step()

    work()  # makes the optimizer's states
    with WorkCounter() as counter:
        work()
    return {
        "product": Work(lambda: left @ right, 2 * left.numel() * right.shape[1]),
        "pointwise": Work(work, counter.bytes_accessed),
        "draw": Work(lambda: torch.empty_like(hidden).bernoulli_(0.9), hidden.numel()),
    }


def build_sending(processes: int) -> dict[str, Work]:
    """Returns what processes do together.

    The count of `large sum` is the bytes that each process sends, that of `sharded layers` the operators on sharded
    tensors.
    """
    message, left, right = torch.zeros(MESSAGE // 4), torch.randn(SEGMENT_ROWS, WIDTH), torch.randn(WIDTH, 4 * WIDTH)
    width = 8 * processes
    plain, sharded = (nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)) for _ in range(2))
    parallelize_module(sharded, init_device_mesh("cpu", (processes,)), {"0": ColwiseParallel(), "1": RowwiseParallel()})
    inputs = torch.ones(1, width, requires_grad=True)

    def add_up() -> None:
        dist.all_reduce(torch.zeros(1))

    def multiply(then: Callable[[], object]) -> None:
        for _ in range(REPEATED):
            _ = left @ right
            then()

    def propagate(model: nn.Module) -> None:
        for _ in range(REPEATED):
            model(inputs).sum().backward()

    with WorkCounter() as counter:
        propagate(sharded)
    return {
        "small sum": Work(add_up),
        "large sum": Work(lambda: dist.all_reduce(message), 2 * MESSAGE * (processes - 1) / processes),
        "products": Work(partial(multiply, lambda: None)),
        "products and sums": Work(partial(multiply, add_up)),
        "layers": Work(partial(propagate, plain)),
        "sharded layers": Work(partial(propagate, sharded), counter.sharded, sum(counter.calls.values())),
    }
