"""Memory of each process: a frozen teacher in every layout, and students under ZeRO 1 to 3, against the arithmetic.

    python -m benchmarks.sharded_memory                    # a BERT of 110M random weights, 2 and 4 processes
    python -m benchmarks.sharded_memory --hidden 256 --layers 4 --processes 2

A teacher's floor is its part of the weights. What a process needs beside that is measured where nothing is cut (the
activations), plus what FSDP gathers at a time: the two largest groups that follow one another, each in the buffer it
arrives in and in the weights it is copied to. A student's floor is 16 bytes a parameter (weight, gradient and AdamW's
two moments in float32) less what its layout cuts. On a CPU it is the process's own memory and the pages of the
checkpoint that its weights lie in, where they are mapped; on a GPU what PyTorch took.
"""

import argparse
import os
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

# Freed blocks go back to the system at once, or a process would seem to hold what it doesn't.
os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}

import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification, PreTrainedModel

from distill.parallel.layout import Layout, parse_layout
from distill.parallel.mesh import mesh_of
from distill.parallel.pipeline import PipelineForward
from distill.teacher.online import OnlineTeacher
from distill.teacher.shard import SharedTeacher
from distill.train.config import TrainConfig
from distill.train.optimizer import build_optimizer
from pipelines.runs.console import Console
from pipelines.runs.placement import device_type, laid_out
from pipelines.settings.this_machine import describe

AUTO = AutoModelForSequenceClassification
BATCH, LENGTH = 4, 32
TEACHERS = ("fsdp={n}", "tp={n}", "pp={n}")
STUDENTS = ("replicated", "zero1", "zero2", "fsdp={n}")


@dataclass
class Peak:
    """Bytes above what was there before, at most and at the end, and those of the checkpoint's files in memory."""

    most: int = 0
    held: int = 0
    mapped: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    given = parser.parse_args()
    console = Console()
    console.say(f"{describe()}, torch {torch.__version__}")
    with TemporaryDirectory() as folder:
        model = make(Path(folder) / "model", given.hidden, given.layers)
        weights = 4 * sum(parameter.numel() for parameter in model.parameters())
        largest = gathered(model)
        alone = in_world(teacher_peak, 1, Path(folder), "replicated")[0]
        activations = alone.most - (0 if alone.mapped else weights)
        teachers = [["1", "replicated", mb(alone.most + alone.mapped), mb(weights), mb(activations), ""]]
        students = []
        for n in given.processes:
            for form in TEACHERS:
                layout = form.format(n=n)
                most = max(peak.most + peak.mapped for peak in in_world(teacher_peak, n, Path(folder), layout))
                beside = activations + (largest if layout.startswith("fsdp") else 0)
                share = (most - beside) / (weights / n)
                teachers.append([str(n), layout, mb(most), mb(weights / n), mb(beside), f"{share:.2f}"])
            for form in STUDENTS:
                layout = form.format(n=n)
                peaks = in_world(student_peak, n, Path(folder), layout)
                held, most = max(peak.held for peak in peaks), max(peak.most for peak in peaks)
                floor = formula(parse_layout(layout, n), weights)
                students.append([str(n), layout, mb(held), mb(floor), f"{held / floor:.2f}", mb(most)])
    console.table(
        f"Frozen teacher of {weights / 1e6:.0f} MB: MB a process",
        ("processes", "layout", "peak", "its part", "beside that", "(peak - beside) / part"),
        teachers,
    )
    console.table(
        "Student of the same size in training: MB a process",
        ("processes", "layout", "held after a step", "by the formula", "ratio", "peak in a step"),
        students,
    )


def make(folder: Path, hidden: int, layers: int) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": hidden // 64}
    model = BertForSequenceClassification(BertConfig(**sizes, intermediate_size=4 * hidden))
    model.save_pretrained(folder)
    return model


def gathered(model: PreTrainedModel) -> int:
    """Bytes that FSDP needs for the two largest neighbours among the groups that it gathers."""
    layer = 4 * sum(parameter.numel() for parameter in model.base_model.encoder.layer[0].parameters())
    embedding = 4 * model.get_input_embeddings().weight.numel()
    return 2 * (layer + max(layer, embedding))


def formula(layout: Layout, weights: int) -> float:
    """Bytes that stay between two steps: weights, gradients, moments."""
    n = layout.processes
    if layout.zero == 1:
        return weights * (2 + 2 / n)
    return weights * 4 / n if layout.zero == 2 or layout.sharded else weights * 4


def in_world(work: Any, processes: int, folder: Path, layout: str) -> list[Peak]:
    store = folder / f"store-{time.monotonic_ns()}"
    torch.multiprocessing.start_processes(
        partial(in_process, work, processes, folder, store, layout), nprocs=processes, start_method="spawn"
    )
    return [torch.load(f"{store}.{rank}", weights_only=False) for rank in range(processes)]


def in_process(work: Any, processes: int, folder: Path, store: Path, layout: str, rank: int) -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    if device_type() == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    backend = "cpu:gloo,cuda:nccl" if device_type() == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=processes)
    small = make(folder / f"warm-{rank}", 64, 2)  # what the first use of the library leaves stays out of the figure
    small(**batch()).logits.sum().backward()
    del small
    torch.save(work(folder / "model", parse_layout(layout, processes)), f"{store}.{rank}")
    dist.barrier()
    dist.destroy_process_group()


def batch() -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.randint(1000, (BATCH, LENGTH)),
        "attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.long),
    }


def teacher_peak(folder: Path, layout: Layout) -> Peak:
    mesh = mesh_of(layout, device_type())
    with watched() as peak:
        if layout.pp > 1:
            stage = laid_out(folder, AUTO, layout, mesh, frozen=True)
            teacher: Any = SharedTeacher(PipelineForward(stage, mesh.get_group("pp")), mesh)
        else:
            model = laid_out(folder, AUTO, layout, mesh, frozen=True)
            teacher = OnlineTeacher(model, device=model.device)
            teacher = SharedTeacher(teacher, mesh) if layout.sharded else teacher
        for _ in range(3):
            teacher(batch())
    if device_type() == "cpu":
        peak.mapped = mapped(folder)
    return peak


def student_peak(folder: Path, layout: Layout) -> Peak:
    """Two steps; `held` is what stays with gradients and moments in memory."""
    mesh = mesh_of(layout, device_type())
    with watched() as peak:
        model = laid_out(folder, AUTO, layout, mesh).train()
        runs = model if any(isinstance(p, DTensor) for p in model.parameters()) else wrapped(model)
        optimizer = build_optimizer(model, [], TrainConfig(), shard=layout.zero == 1)
        for _ in range(2):
            optimizer.zero_grad()
            inputs = {name: value.to(model.device) for name, value in batch().items()}
            runs(**inputs).logits.square().mean().backward()
            optimizer.step()
    return peak


def wrapped(model: PreTrainedModel) -> DistributedDataParallel:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


@contextmanager
def watched() -> Any:
    """Fills a `Peak` while the context lasts."""
    peak, before, running = Peak(), memory(), True
    if device_type() == "cuda":
        torch.cuda.reset_peak_memory_stats()

    def watch() -> None:
        while running:
            peak.most = max(peak.most, memory() - before)
            time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
        peak.held = memory() - before
    finally:
        running = False
        thread.join()
    if device_type() == "cuda":
        peak.most = torch.cuda.max_memory_allocated() - before


def memory() -> int:
    """Bytes that are this process's own."""
    if device_type() == "cuda":
        return torch.cuda.memory_allocated()
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError("RssAnon isn't in /proc/self/status: this benchmark needs Linux or a GPU")


def mapped(folder: Path) -> int:
    """Bytes of the folder's files that lie in memory as this process's weights."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(maxsplit=1)[0]:
            inside = str(folder) in line
        elif inside and line.startswith("Rss:"):
            found += 1024 * int(line.split()[1])
    return found


def mb(size: float) -> str:
    return f"{size / 1e6:,.0f}"


if __name__ == "__main__":
    main()
