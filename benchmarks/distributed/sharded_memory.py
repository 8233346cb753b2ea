"""Memory of each process: a frozen teacher in every layout, and students with ZeRO 1 to 3.

    python -m benchmarks.distributed.sharded_memory  # a BERT of 110M random weights, 2 and 4 processes
    python -m benchmarks.distributed.sharded_memory --hidden 256 --layers 4 --processes 2

The data are random tokens, in batches of 4 x 32. Printed per layout are MB per process. Of a teacher: the peak; the
lower bound, its share of the weights; and what a process needs in addition, which is measured where nothing is sharded
(the activations), plus what FSDP gathers at a time: the two largest consecutive groups, each in the buffer that
receives it and in the weights that it is copied to. Of a student: the memory held after a step; the lower bound, 16
bytes per parameter (weight, gradient and AdamW's two moments in float32) less what the layout shards; and the peak
within a step. On a CPU, memory is that of the process itself and the pages of the checkpoint that its weights are
mapped to; on a GPU, what PyTorch allocated.
"""

import argparse
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, TypeAlias

# Returns freed blocks to the system at once; otherwise a process would seem to hold memory that it has freed.
os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification, PreTrainedModel

from benchmarks.common.machine import describe_setup
from compress.measure.memory import read_kernel_sizes
from distill.losses.teacher_signals import SignalSource
from distill.parallel.layout import Layout, parse_layout
from distill.parallel.mesh import build_mesh
from distill.parallel.pipeline import PipelineForward
from distill.teacher.online import OnlineTeacher
from distill.teacher.shard import ShardedTeacher
from distill.train.config import TrainConfig
from distill.train.optimizer import build_optimizer
from pipelines.runs.console import Console
from pipelines.runs.placement import detect_device_type, load_in_layout

AUTO = AutoModelForSequenceClassification
BATCH, LENGTH = 4, 32
TEACHERS = ("fsdp={n}", "tp={n}", "pp={n}")
STUDENTS = ("replicated", "zero1", "zero2", "fsdp={n}")


@dataclass
class MemoryUse:
    """Bytes above those before: at most, at the end, and of the checkpoint's files that are in memory."""

    peak: int = 0
    held_bytes: int = 0
    mapped: int = 0


Work: TypeAlias = Callable[[Path, Layout], MemoryUse]  # measures the checkpoint of a folder in a layout


class Model(NamedTuple):
    """The checkpoint that is measured, and its bytes: of all weights, and those that FSDP needs to gather groups."""

    folder: Path
    weights: int
    gathered: int


def main() -> None:
    """Measures all layouts and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    options = parser.parse_args()
    console = Console()
    console.say(describe_setup())
    with TemporaryDirectory() as directory:
        model = save_model(Path(directory) / "model", options.hidden, options.layers)
        weights = 4 * sum(parameter.numel() for parameter in model.parameters())
        checkpoint = Model(Path(directory) / "model", weights, count_gathered_bytes(model))
        teachers = measure_teachers(checkpoint, options.processes)
        students = measure_students(checkpoint, options.processes)
    console.table(
        f"Frozen teacher of {weights / 1e6:.0f} MB: MB per process",
        ("processes", "layout", "peak", "its share", "in addition", "(peak - addition) / share"),
        teachers,
    )
    console.table(
        "Student of the same size in training: MB per process",
        ("processes", "layout", "held after a step", "lower bound", "ratio", "peak in a step"),
        students,
    )


def measure_teachers(model: Model, counts: list[int]) -> list[tuple[str, ...]]:
    """Returns a table row for each layout of a frozen teacher."""
    single = run_processes(measure_teacher, 1, model.folder, "replicated")[0]
    activations = single.peak - (0 if single.mapped else model.weights)
    peak = single.peak + single.mapped
    rows: list[tuple[str, ...]] = [
        ("1", "replicated", format_mb(peak), format_mb(model.weights), format_mb(activations), "")
    ]
    for count in counts:
        for form in TEACHERS:
            layout, share = form.format(n=count), model.weights / count
            peaks = run_processes(measure_teacher, count, model.folder, layout)
            peak = max(each.peak + each.mapped for each in peaks)
            addition = activations + (model.gathered if layout.startswith("fsdp") else 0)
            figures = format_mb(peak), format_mb(share), format_mb(addition), f"{(peak - addition) / share:.2f}"
            rows.append((str(count), layout, *figures))
    return rows


def measure_students(model: Model, counts: list[int]) -> list[tuple[str, ...]]:
    """Returns a table row for each layout of a student."""
    rows: list[tuple[str, ...]] = []
    for count in counts:
        for form in STUDENTS:
            layout = form.format(n=count)
            peaks = run_processes(measure_student, count, model.folder, layout)
            state_bytes, peak = max(each.held_bytes for each in peaks), max(each.peak for each in peaks)
            bound = count_state_bytes(parse_layout(layout, count), model.weights)
            figures = format_mb(state_bytes), format_mb(bound), f"{state_bytes / bound:.2f}", format_mb(peak)
            rows.append((str(count), layout, *figures))
    return rows


def save_model(folder: Path, hidden: int, layers: int) -> BertForSequenceClassification:
    """Returns a BERT with random weights, after saving it."""
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=hidden // 64, intermediate_size=4 * hidden
    )
    model = BertForSequenceClassification(config)
    model.save_pretrained(folder)
    return model


def count_gathered_bytes(model: BertForSequenceClassification) -> int:
    """Returns the bytes that FSDP needs for the two largest consecutive groups that it gathers."""
    layer = 4 * sum(parameter.numel() for parameter in model.bert.encoder.layer[0].parameters())
    embedding = 4 * model.bert.embeddings.word_embeddings.weight.numel()
    return 2 * (layer + max(layer, embedding))


def count_state_bytes(layout: Layout, weights: int) -> float:
    """Returns the bytes per process of weights, gradients and moments, which remain between two steps."""
    n = layout.processes
    if layout.zero == 1:
        return weights * (2 + 2 / n)
    return weights * 4 / n if layout.zero == 2 or layout.sharded else weights * 4


def run_processes(work: Work, processes: int, folder: Path, layout: str) -> list[MemoryUse]:
    """Returns what each of several processes measures."""
    store = folder.parent.resolve() / f"store-{time.monotonic_ns()}"
    torch.multiprocessing.start_processes(
        partial(run_process, work, processes, folder, store, layout), nprocs=processes, start_method="spawn"
    )
    return [MemoryUse(**json.loads(Path(f"{store}.{rank}").read_text())) for rank in range(processes)]


def run_process(work: Work, processes: int, folder: Path, store: Path, layout: str, rank: int) -> None:
    """Writes what this process measures to the file `store.rank`."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    if detect_device_type() == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    backend = "cpu:gloo,cuda:nccl" if detect_device_type() == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=processes)
    warmup = save_model(folder.parent / f"warmup-{rank}", 64, 2)  # the first use of the library allocates memory too
    warmup(**make_batch()).logits.sum().backward()
    del warmup
    use = work(folder, parse_layout(layout, processes))
    Path(f"{store}.{rank}").write_text(json.dumps(asdict(use)))
    dist.barrier()
    dist.destroy_process_group()


def make_batch() -> dict[str, torch.Tensor]:
    """Returns a batch of random tokens [BATCH, LENGTH]."""
    return {
        "input_ids": torch.randint(1000, (BATCH, LENGTH)),
        "attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.long),
    }


def load_teacher(folder: Path, layout: Layout) -> tuple[PreTrainedModel, SignalSource]:
    """Returns a frozen model in a layout, and the teacher that queries it."""
    mesh = build_mesh(layout, detect_device_type())
    model = load_in_layout(folder, AUTO, layout, mesh, frozen=True)
    if layout.pp > 1:
        return model, ShardedTeacher(PipelineForward(model, mesh.get_group("pp")), mesh)
    online = OnlineTeacher(model, device=model.device)
    return model, ShardedTeacher(online, mesh) if layout.sharded else online


def measure_teacher(folder: Path, layout: Layout) -> MemoryUse:
    """Returns the memory of this process during three queries of a frozen teacher."""
    with record_memory() as use:
        _, teacher = load_teacher(folder, layout)
        for _ in range(3):
            teacher(make_batch())
    if detect_device_type() == "cpu":
        use.mapped = count_mapped_bytes(folder)
    return use


def measure_student(folder: Path, layout: Layout) -> MemoryUse:
    """Returns the memory of this process during two steps of a student; `held_bytes` includes gradients and moments."""
    mesh = build_mesh(layout, detect_device_type())
    with record_memory() as use:
        model = load_in_layout(folder, AUTO, layout, mesh).train()
        trained: nn.Module = model
        if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            trained = DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer = build_optimizer(model, [], TrainConfig(), shard=layout.zero == 1)
        for _ in range(2):
            optimizer.zero_grad()
            inputs = {name: value.to(model.device) for name, value in make_batch().items()}
            trained(**inputs).logits.square().mean().backward()
            optimizer.step()
    return use


@contextmanager
def record_memory() -> Iterator[MemoryUse]:
    """Yields a `MemoryUse` that is filled while the context lasts."""
    use, before, running = MemoryUse(), read_memory(), True
    if detect_device_type() == "cuda":
        torch.cuda.reset_peak_memory_stats()

    def sample() -> None:
        while running:
            use.peak = max(use.peak, read_memory() - before)
            time.sleep(0.002)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield use
        use.held_bytes = read_memory() - before
    finally:
        running = False
        thread.join()
    if detect_device_type() == "cuda":
        use.peak = torch.cuda.max_memory_allocated() - before


def read_memory() -> int:
    """Returns the bytes of this process: on a GPU the allocated ones, on a CPU those that are no pages of files.

    Raises:
        RuntimeError: The system doesn't report them.
    """
    if detect_device_type() == "cuda":
        return torch.cuda.memory_allocated()
    sizes = read_kernel_sizes()
    if "RssAnon" not in sizes:
        raise RuntimeError("RssAnon isn't in /proc/self/status: this benchmark needs Linux or a GPU")
    return sizes["RssAnon"]


def count_mapped_bytes(folder: Path) -> int:
    """Returns the resident bytes of the folder's files that this process maps."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(maxsplit=1)[0]:
            inside = str(folder) in line
        elif inside and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


def format_mb(size: float) -> str:
    """Returns bytes in MB."""
    return f"{size / 1e6:,.0f}"


if __name__ == "__main__":
    main()
