r"""Time of a training step of a teacher and a student that are distributed over processes or GPUs.

    python -m benchmarks.distributed.paired_step --precision 32 bf16 fp8  # one device, nothing is sharded
    torchrun --nproc-per-node 8 -m benchmarks.distributed.paired_step --precision bf16 \
        --pairs replicated/replicated fsdp=8/replicated fsdp=8/fsdp=8 tp=8/fsdp=8
    python -m benchmarks.distributed.paired_step --teacher 2x128 --student 1x128 --batch 4 --length 16 --rounds 3

A pair is a teacher layout / a student layout; both are BERT classifiers with random weights, the data random tokens. In
a step the teacher computes its logits, the student is trained on them, gradients are clipped and AdamW updates the
weights. All pairs and precisions alternate. Printed per pair and precision: the median milliseconds; the median ratio
to the first one within a round; a lower bound, the floating-point work of a process's matrix products (2 operations per
weight and token in a forward pass, 4 in a backward pass) at the rate that one large product reaches here in that
precision; tokens per second; and, on a GPU, from a profile of two steps, the share of the time in which the device was
busy, and the share of the communication that overlapped with computation.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.autograd.profiler_util import FunctionEvent
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification, PreTrainedModel

from benchmarks.common.machine import describe_setup
from benchmarks.common.timing import median_ratio
from compress.measure.precision_speed import measure_peak_flops
from compress.measure.turns import time_in_turns
from distill.losses.logits import forward_kl
from distill.losses.teacher_signals import SignalSource
from distill.parallel.clip import clip_gradients
from distill.parallel.layout import parse_layout
from distill.parallel.mesh import build_mesh, find_data_rank
from distill.parallel.pipeline import PipelineForward
from distill.teacher.online import OnlineTeacher
from distill.teacher.shard import ShardedTeacher
from distill.train.config import TrainConfig
from distill.train.optimizer import build_optimizer
from pipelines.runs.console import Console
from pipelines.runs.placement import detect_device_type, load_in_layout
from pipelines.runs.processes import count_processes, join_world, leave_world
from pipelines.runs.strategies.by_layout import choose_device

AUTO = AutoModelForSequenceClassification
CLASSES, VOCABULARY = 64, 30522
COMMUNICATION = ("nccl", "all_gather", "all_reduce", "reduce_scatter")  # parts of the names of kernels
FP8_CAPABILITY = (8, 9)  # lowest compute capability with fp8
NO_GPU = "no GPU"
Interval: TypeAlias = tuple[float, float]  # start and end


def main() -> None:
    """Times all pairs and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", nargs="+", default=["replicated/replicated"])
    parser.add_argument("--precision", nargs="+", choices=("32", "bf16", "fp8"), default=["32", "bf16"])
    parser.add_argument("--teacher", default="24x1024", help="layers x width")
    parser.add_argument("--student", default="6x512", help="layers x width")
    parser.add_argument("--batch", type=int, default=32, help="rows of each process that reads its own data")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    if not os.environ.get("MASTER_PORT"):
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    join_world(600)
    transformers.utils.logging.disable_progress_bar()
    console = Console()
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(share_name(directory))
        if dist.get_rank() == 0:
            for name in ("teacher", "student"):
                save_model(folder / name, getattr(options, name))
        dist.barrier()
        compare(options, folder, console)
        dist.barrier()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else NO_GPU
    console.say(f"{describe_setup()}, {device}, {count_processes()} processes")
    leave_world()


def share_name(name: str) -> str:
    """Returns the first process's value."""
    names = [name]
    dist.broadcast_object_list(names)
    return names[0]


def save_model(folder: Path, size: str) -> None:
    """Saves a classifier with random weights; `size` is its layers x width."""
    layers, width = (int(number) for number in size.split("x"))
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
    )
    config.num_labels = CLASSES
    BertForSequenceClassification(config).save_pretrained(folder)


def compare(options: argparse.Namespace, folder: Path, console: Console) -> None:
    """Times all pairs in all precisions and prints the table."""
    pairs = build_pairs(options, folder, console)
    steps = {name: pair.step for name, pair in pairs.items()}
    times = time_in_turns(steps, options.rounds, warmup=2, before=settle, after=synchronize)
    first = next(iter(times.values()))
    rows = []
    for name, pair in pairs.items():
        median, ratio = statistics.median(times[name]), median_ratio(times[name], first)
        tokens = options.batch * options.length * pair.data_ranks / median
        bound = pair.compute_lower_bound()
        figures = (f"{median * 1e3:.1f}", f"{ratio:.3f}", f"{bound * 1e3:.1f}", f"{tokens:,.0f}")
        rows.append((name, *figures, *profile_overlap(pair.step)))
    figures_header = ("median ms", "ratio", "lower bound ms", "tokens/s", "device busy", "communication hidden")
    sizes = f"teacher {options.teacher}, student {options.student}, {options.batch} x {options.length}"
    console.table(f"A step: {sizes}", ("teacher/student", *figures_header), rows)


def build_pairs(options: argparse.Namespace, folder: Path, console: Console) -> Mapping[str, "Pair"]:
    """Returns name -> pair for all pairs and precisions that this machine supports."""
    pairs = {}
    for name in options.pairs:
        for precision in options.precision:
            if precision == "fp8" and not has_fp8():
                console.say(f"fp8: needs a GPU of compute capability {FP8_CAPABILITY[0]}.{FP8_CAPABILITY[1]}; skipped")
            else:
                pairs[f"{name} {precision}"] = Pair(name, precision, folder, options)
    return pairs


class Pair:
    """A teacher and a student in their layouts, with a batch and the student's optimizer."""

    def __init__(self, name: str, precision: str, folder: Path, options: argparse.Namespace):
        teacher, student = name.split("/")
        world = dist.get_world_size()
        layout = parse_layout(student, world, "student")
        if layout.pp > 1 or layout.zero == 1:
            raise SystemExit(
                f"--pairs {name}: expected no student in pipeline stages or with zero1: it isn't timed here"
            )
        self.precision, self.teacher_layout, self.layout = precision, parse_layout(teacher, world, "teacher"), layout
        mesh = build_mesh(layout, detect_device_type())
        rank, self.data_ranks = find_data_rank(mesh)
        self.model = load_in_layout(folder / "student", AUTO, layout, mesh).train()
        self.teacher = self._load_teacher(folder / "teacher")
        self.trained: nn.Module = self.model
        if precision == "fp8":
            convert_to_fp8(self.model)
        if not any(isinstance(module, FSDPModule) for module in self.model.modules()) and layout.dp > 1:
            self.trained = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self.optimizer = build_optimizer(self.model, [], TrainConfig())
        generator = torch.Generator().manual_seed(rank)
        ids = torch.randint(1000, VOCABULARY, (options.batch, options.length), generator=generator)
        ids = ids.to(choose_device("auto"))
        self.batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def step(self) -> None:
        """Runs a training step."""
        self.optimizer.zero_grad()
        with self._autocast():
            teacher_logits = self.teacher(self.batch)["logits"]
            logits = self.trained(**self.batch).logits
            loss = forward_kl(logits.float(), teacher_logits.float(), temperature=2.0)
        loss.backward()
        clip_gradients(self.model.parameters(), 1.0)
        self.optimizer.step()

    def compute_lower_bound(self) -> float:
        """Returns the seconds of a process's matrix products if the work were distributed evenly."""
        tokens = self.batch["input_ids"].numel() * self.data_ranks / dist.get_world_size()
        operations = (2 * self.teacher_weights + 6 * count_product_weights(self.model)) * tokens
        return operations / measure_rate(self.precision)

    def _load_teacher(self, folder: Path) -> SignalSource:
        mesh = build_mesh(self.teacher_layout, detect_device_type())
        model = load_in_layout(folder, AUTO, self.teacher_layout, mesh, frozen=True)
        self.teacher_weights = count_product_weights(model)
        if self.teacher_layout.pp > 1:
            self.teacher_weights = sum_over(mesh.get_group("pp"), self.teacher_weights)
            return ShardedTeacher(PipelineForward(model, mesh.get_group("pp")), mesh)
        if self.precision == "fp8":
            convert_to_fp8(model)
        online = OnlineTeacher(model, device=choose_device("auto"))
        return ShardedTeacher(online, mesh) if self.teacher_layout.sharded else online

    def _autocast(self) -> AbstractContextManager[object]:
        return nullcontext() if self.precision == "32" else torch.autocast(detect_device_type(), dtype=torch.bfloat16)


def count_product_weights(model: PreTrainedModel) -> int:
    """Returns the number of weights of all linear layers: with their shards, but without other pipeline stages."""
    return sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))


def sum_over(group: dist.ProcessGroup, count: int) -> int:
    """Returns the sum of a count over the processes of a group; each of them has to call this."""
    total = torch.tensor(count, device=choose_device("auto"))
    dist.all_reduce(total, group=group)
    return int(total)


@cache
def measure_rate(precision: str) -> float:
    """Returns the floating-point operations per second of one large product; for fp8 twice those of bfloat16."""
    size = 4096 if detect_device_type() == "cuda" else 1024
    dtype = torch.float32 if precision == "32" else torch.bfloat16
    return measure_peak_flops(choose_device("auto"), dtype, size) * (2 if precision == "fp8" else 1)


def has_fp8() -> bool:
    """Returns whether this machine's GPU has fp8."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= FP8_CAPABILITY


def convert_to_fp8(model: nn.Module) -> None:
    """Replaces linear layers by torchao's fp8 layers, except those with sizes that are no multiples of 16."""
    from torchao.float8 import convert_to_float8_training

    def is_supported(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and not any(side % 16 for side in module.weight.shape)

    convert_to_float8_training(model, module_filter_fn=is_supported)


def settle() -> None:
    """Waits for all processes and for the GPU."""
    dist.barrier()
    synchronize()


def synchronize() -> None:
    """Waits for the GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def profile_overlap(step: Callable[[], None]) -> tuple[str, str]:
    """Returns (share of two steps in which the device was busy, share of communication beside computation)."""
    if not torch.cuda.is_available():
        step()
        step()
        return NO_GPU, NO_GPU
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities):  # its start takes long
        step()
        synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        start = time.perf_counter()
        step()
        step()
        synchronize()
        seconds = time.perf_counter() - start
    kernels = [event for event in profile.events() or [] if event.device_type == torch.autograd.DeviceType.CUDA]
    communicates = [any(part in kernel.name.lower() for part in COMMUNICATION) for kernel in kernels]
    sending = list_intervals(kernel for kernel, sends in zip(kernels, communicates, strict=True) if sends)
    working = list_intervals(kernel for kernel, sends in zip(kernels, communicates, strict=True) if not sends)
    busy = total_length(merge_intervals([*sending, *working])) / 1e6 / seconds
    if not sending:
        return f"{busy:.0%}", "none sent"
    return f"{busy:.0%}", f"{overlap_length(sending, working) / total_length(sending):.0%}"


def list_intervals(events: Iterable[FunctionEvent]) -> list[Interval]:
    """Returns the times of the events in microseconds, merged."""
    return merge_intervals([(event.time_range.start, event.time_range.end) for event in events])


def merge_intervals(intervals: list[Interval]) -> list[Interval]:
    """Returns the same times as intervals that neither overlap nor touch, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def total_length(intervals: list[Interval]) -> float:
    """Returns the sum of the lengths."""
    return sum(end - start for start, end in intervals)


def overlap_length(one: list[Interval], other: list[Interval]) -> float:
    """Returns the length of the times in both lists, each of which is merged."""
    return total_length(one) + total_length(other) - total_length(merge_intervals([*one, *other]))


if __name__ == "__main__":
    main()
