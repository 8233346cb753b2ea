"""One step of a teacher and a student that lie on several processes or GPUs: time, work, and how much is overlapped.

    python -m benchmarks.paired_step --precision 32 bf16 fp8                       # one device: no layout cuts anything
    torchrun --nproc-per-node 8 -m benchmarks.paired_step --precision bf16 \\
        --pairs replicated/replicated fsdp=8/replicated fsdp=8/fsdp=8 tp=8/fsdp=8
    python -m benchmarks.paired_step --teacher 2x128 --student 1x128 --batch 4 --length 16 --rounds 3   # to try it out

A pair is teacher layout / student layout. The step: the teacher answers, the student learns from its logits, gradients
are clipped, AdamW steps. All pairs and precisions take turns; a ratio is the median over rounds of the round's ratio
to the first one. The floor is the floating-point work of one process's products (2 a weight and token forwards, 4
backwards) at the rate that one large product reaches here in that precision. On a GPU a profile of two steps says
which share of the time the device was busy, and which share of the communication ran beside products.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification, PreTrainedModel

from compress.measure.training_precision import peak_flops
from distill.losses.logits import forward_kl
from distill.parallel.clip import clip_gradients
from distill.parallel.layout import parse_layout
from distill.parallel.mesh import data_rank, mesh_of
from distill.parallel.pipeline import PipelineForward
from distill.teacher.online import OnlineTeacher
from distill.teacher.shard import Ask, SharedTeacher
from distill.train.config import TrainConfig
from distill.train.optimizer import build_optimizer
from pipelines.runs.console import Console
from pipelines.runs.placement import device_type, laid_out
from pipelines.runs.processes import join_world, leave_world, processes
from pipelines.runs.strategies import device_of
from pipelines.settings.this_machine import commit, describe

AUTO = AutoModelForSequenceClassification
CLASSES, WORDS = 64, 30522
COMMUNICATION = ("nccl", "all_gather", "all_reduce", "reduce_scatter")
FP8_SINCE = (8, 9)  # compute capability


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", nargs="+", default=["replicated/replicated"])
    parser.add_argument("--precision", nargs="+", choices=("32", "bf16", "fp8"), default=["32", "bf16"])
    parser.add_argument("--teacher", default="24x1024", help="layers x width")
    parser.add_argument("--student", default="6x512", help="layers x width")
    parser.add_argument("--batch", type=int, default=32, help="rows a process with data of its own")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    if not os.environ.get("MASTER_PORT"):
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    join_world(600)
    transformers.utils.logging.disable_progress_bar()
    console = Console()
    with tempfile.TemporaryDirectory() as own:
        folder = Path(shared_name(own))
        if dist.get_rank() == 0:
            for name in ("teacher", "student"):
                make(folder / name, getattr(given, name))
        dist.barrier()
        compare(given, folder, console)
        dist.barrier()
    console.say(f"{describe()}, {device_name()}, {processes()} processes, torch {torch.__version__}, commit {commit()}")
    leave_world()


def shared_name(own: str) -> str:
    box = [own]
    dist.broadcast_object_list(box)
    return str(box[0])


def make(folder: Path, size: str) -> None:
    layers, width = (int(word) for word in size.split("x"))
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS, hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 64,
        intermediate_size=4 * width, num_labels=CLASSES,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(folder)


def compare(given: argparse.Namespace, folder: Path, console: Console) -> None:
    ways = {}
    for pair in given.pairs:
        for precision in given.precision:
            if precision == "fp8" and not has_fp8():
                console.say(f"fp8: needs a GPU of compute capability {FP8_SINCE[0]}.{FP8_SINCE[1]}; left out here")
                continue
            ways[f"{pair} {precision}"] = Pair(pair, precision, folder, given)
    times = interleaved({name: pair.step for name, pair in ways.items()}, given.rounds)
    first = next(iter(times.values()))
    rows = []
    for name, pair in ways.items():
        median = statistics.median(times[name])
        ratio = statistics.median(a / b for a, b in zip(times[name], first, strict=True))
        busy, hidden = overlap(pair.step)
        tokens = given.batch * given.length * pair.shares / median
        rows.append(
            (name, f"{median * 1e3:.1f}", f"{ratio:.3f}", f"{pair.floor() * 1e3:.1f}", f"{tokens:,.0f}", busy, hidden)
        )
    header = ("teacher/student", "median ms", "ratio", "floor ms", "tokens/s", "device busy", "communication hidden")
    console.table(
        f"A step: teacher {given.teacher}, student {given.student}, {given.batch} x {given.length}", header, rows
    )


class Pair:
    """Both models in their layouts, and what a step needs."""

    def __init__(self, pair: str, precision: str, folder: Path, given: argparse.Namespace):
        taught, learning = pair.split("/")
        world = dist.get_world_size()
        layout = parse_layout(learning, world, "student")
        if layout.pp > 1 or layout.zero == 1:
            raise SystemExit(f"{pair}: a student in pipeline stages or with zero1 isn't timed here")
        self.precision, self.teacher_layout, self.layout = precision, parse_layout(taught, world, "teacher"), layout
        mesh = mesh_of(layout, device_type())
        rank, self.shares = data_rank(mesh)
        self.model = laid_out(folder / "student", AUTO, layout, mesh).train()
        self.teacher = self.asked(folder / "teacher")
        self.runs: nn.Module = self.model
        if precision == "fp8":
            to_fp8(self.model)
        if not any(isinstance(module, FSDPModule) for module in self.model.modules()) and layout.dp > 1:
            self.runs = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self.optimizer = build_optimizer(self.model, [], TrainConfig())
        seeded = torch.Generator().manual_seed(rank)
        ids = torch.randint(1000, WORDS, (given.batch, given.length), generator=seeded)
        self.batch = {
            "input_ids": ids.to(device_of("auto")),
            "attention_mask": torch.ones_like(ids).to(device_of("auto")),
        }

    def asked(self, folder: Path) -> Ask:
        mesh = mesh_of(self.teacher_layout, device_type())
        model = laid_out(folder, AUTO, self.teacher_layout, mesh, frozen=True)
        self.teacher_weights = products(model)
        if self.teacher_layout.pp > 1:
            return SharedTeacher(PipelineForward(model, mesh.get_group("pp")), mesh)
        if self.precision == "fp8":
            to_fp8(model)
        own = OnlineTeacher(model, device=device_of("auto"))
        return SharedTeacher(own, mesh) if self.teacher_layout.sharded else own

    def step(self) -> None:
        self.optimizer.zero_grad()
        with self.autocast():
            answers: Tensor = self.teacher(self.batch)["logits"]
            logits = self.runs(**self.batch).logits
            loss = forward_kl(logits.float(), answers.float(), temperature=2.0)
        loss.backward()
        clip_gradients(self.model.parameters(), 1.0)
        self.optimizer.step()

    def autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.precision == "32" else torch.autocast(device_type(), dtype=torch.bfloat16)

    def floor(self) -> float:
        """Seconds of one process's products alone, were all work shared out evenly."""
        tokens = self.batch["input_ids"].numel() * self.shares / dist.get_world_size()
        return (2 * self.teacher_weights + 6 * products(self.model)) * tokens / rate(self.precision)


def products(model: PreTrainedModel) -> int:
    """Weights of the linear maps, whole."""
    return sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))


@cache
def rate(precision: str, size: int = 4096) -> float:
    """Floating-point operations a second that one large product reaches here; fp8 counts twice bfloat16's."""
    size = size if device_type() == "cuda" else 1024
    kind = torch.float32 if precision == "32" else torch.bfloat16
    return peak_flops(device_of("auto"), kind, size) * (2 if precision == "fp8" else 1)


def has_fp8() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= FP8_SINCE


def to_fp8(model: nn.Module) -> None:
    """Products in fp8 by torchao; the head stays as it is, its sides are no multiples of 16."""
    from torchao.float8 import convert_to_float8_training

    def wide(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and not any(side % 16 for side in module.weight.shape)

    convert_to_float8_training(model, module_filter_fn=wide)


def interleaved(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each step, round by round, after two rounds that don't count."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for count in range(rounds + 2):
        for name, step in steps.items():
            dist.barrier()
            settle()
            start = time.perf_counter()
            step()
            settle()
            if count >= 2:
                times[name].append(time.perf_counter() - start)
    return times


def settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def overlap(step: Callable[[], None]) -> tuple[str, str]:
    """Shares of two steps: of the time, in which the device worked; of communication, that ran beside products."""
    if not torch.cuda.is_available():
        step()
        step()
        return "no GPU", "no GPU"
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    settle()
    start = time.perf_counter()
    with torch.profiler.profile(activities=activities) as profile:
        step()
        step()
        settle()
    seconds = time.perf_counter() - start
    kernels = [event for event in profile.events() or [] if event.device_type == torch.autograd.DeviceType.CUDA]
    sending = merged(spans(each for each in kernels if any(word in each.name.lower() for word in COMMUNICATION)))
    working = merged(spans(each for each in kernels if not any(word in each.name.lower() for word in COMMUNICATION)))
    busy = length(merged([*sending, *working])) / 1e6 / seconds
    hidden = f"{common(sending, working) / length(sending):.0%}" if sending else "none sent"
    return f"{busy:.0%}", hidden


def spans(events: Iterable[Any]) -> list[tuple[float, float]]:
    return [(event.time_range.start, event.time_range.end) for event in events]


def merged(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same times as intervals that don't touch, in order."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def length(intervals: list[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)


def common(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> float:
    """Time that lies in both; each side's intervals don't touch one another."""
    return length(one) + length(other) - length(merged([*one, *other]))


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"


if __name__ == "__main__":
    main()
