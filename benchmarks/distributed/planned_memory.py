"""Predicted peak memory of a process against the measured one, in every layout of a student and of a frozen teacher.

    python -m benchmarks.distributed.planned_memory --output runs/planned-memory  # 3 sizes of BERT on 4 processes
    python -m benchmarks.distributed.planned_memory --sizes small --rows 8 --output runs/planned-memory

A step of training on labels, and a query of a frozen model, each in real processes that send to each other by gloo. The
measured memory is what a process takes at most, in three steps, above what it had before it loaded the model: on a GPU
that of torch's allocator, on a CPU resident memory without pages of files, in which freed blocks go back to the system
at once. Printed are both, and their ratio. Measured layouts are kept in the output's results.jsonl.
"""

import argparse
import gc
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypedDict

from benchmarks.common.machine import describe_setup
from benchmarks.distributed.sharded_memory import (  # sets the allocator up first
    AUTO,
    MemoryUse,
    load_teacher,
    record_memory,
    run_processes,
    save_model,
)

import torch  # isort: skip
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, PreTrainedModel

from benchmarks.common.results_folder import Results, check_settings
from distill.losses.config import LossConfig
from distill.parallel.layout import Layout, parse_layout
from distill.parallel.mesh import build_mesh
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from distill.train.optimizer import build_optimizer
from distill.train.steps.pipeline import train_stages
from pipelines.planner.fake_process_group import simulate_world
from pipelines.planner.stage_trace import count_micro_batches, trace_stages
from pipelines.planner.trace import Query, StepTrace, Training, trace_query, trace_step
from pipelines.runs.console import Console
from pipelines.runs.placement import build_pipeline_trainer, detect_device_type, load_in_layout

SIZES = {"small": (256, 4), "medium": (512, 6), "base": (768, 12), "large": (1024, 24)}  # hidden, layers
LAYOUTS = (
    "replicated",
    "zero1",
    "zero2",
    "fsdp=4",
    "hsdp=2x2",
    "tp=4",
    "fsdp=2,tp=2",
    "dp=2,tp=2",
    "pp=2,dp=2",
    "pp=4",
)
STEPS = 3  # in the second one DistributedDataParallel replaces its buckets, which are empty until they are written


class Result(TypedDict):
    """A line of results.jsonl."""

    size: str
    role: str
    layout: str
    checkpointing: str
    measured: int


def main() -> None:
    """Measures what is missing and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["small", "medium", "base"])
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS))
    parser.add_argument("--checkpointing", nargs="+", default=["none"])
    parser.add_argument("--rows", type=int, default=16, help="of a batch of all processes")
    parser.add_argument("--length", type=int, default=128)
    options = parser.parse_args()
    check_settings(options.output, options, free=("sizes", "layouts", "checkpointing"))
    console, results = Console(), Results[Result](options.output)
    console.say(f"{describe_setup()}, {detect_device_type()}, {options.processes} processes")
    rows, ratios = [], []
    for size in options.sizes:
        folder = save_once(size, options.output)
        for role, name, mode in list_cases(options):
            layout = parse_layout(name, options.processes)
            predicted = predict(folder, role, layout, mode, options.rows, options.length).peak
            known = results.find(size=size, role=role, layout=name, checkpointing=mode)
            if known is None:
                work = partial(measure_peak, role, options.rows, options.length, mode)
                measured = max(use.peak for use in run_processes(work, options.processes, folder, name))
                known = results.add(Result(size=size, role=role, layout=name, checkpointing=mode, measured=measured))
            ratios.append(predicted / known["measured"])
            cells = f"{predicted / 1e6:,.0f}", f"{known['measured'] / 1e6:,.0f}", f"{ratios[-1]:.2f}"
            rows.append((size, role, name, mode, *cells))
    header = ("size", "model", "layout", "checkpointing", "predicted MB", "measured MB", "ratio")
    console.table(f"Peak of a process, {options.rows} rows of {options.length} tokens in all", header, rows)
    console.say(f"within 10 %: {sum(abs(ratio - 1) <= 0.1 for ratio in ratios)} of {len(ratios)}")


def list_cases(options: argparse.Namespace) -> list[tuple[str, str, str]]:
    """Returns (role, layout, checkpointing) of each measurement."""
    students = [("student", layout, mode) for layout in options.layouts for mode in options.checkpointing]
    return students + [("teacher", layout, "none") for layout in options.layouts if not layout.startswith("zero")]


def draw_batch(rows: int, length: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Returns a batch of equal tokens with labels."""
    ids = torch.ones(rows, length, dtype=torch.long, device=device)
    labels = torch.zeros(rows, dtype=torch.long, device=device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def save_once(size: str, output: Path) -> Path:
    """Returns the folder of a model of this size, which is saved if it isn't there."""
    folder = output / f"model-{size}"
    if not folder.exists():
        save_model(folder, *SIZES[size])
    return folder


def predict(folder: Path, role: str, layout: Layout, mode: str, rows: int, length: int) -> StepTrace:
    """Returns what the planner says of a batch with this many rows on all processes of the layout."""

    def build() -> PreTrainedModel:
        model: PreTrainedModel = AUTO.from_config(AutoConfig.from_pretrained(folder))
        return model

    replica_rows = rows // layout.data_parallel
    count, size = count_micro_batches(replica_rows) if layout.pp > 1 else (1, replica_rows)
    draw = partial(draw_batch, size, length)
    training = Training(build, draw, train=TrainConfig(checkpointing=mode), backend=find_backend())
    work = training if role == "student" else Query(build, draw)
    with simulate_world(layout.processes):
        if layout.pp > 1:
            return trace_stages(work, layout, count)
        return trace_step(work, layout) if isinstance(work, Training) else trace_query(work, layout)


def find_backend() -> str:
    """Returns what sends between the devices that are measured."""
    return "gloo" if detect_device_type() == "cpu" else "nccl"


class Step(nn.Module):
    """The training step of a module, as a forward pass that DistributedDataParallel can wrap."""

    def __init__(self, module: DistillationModule):
        super().__init__()
        self.module = module

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Returns the loss."""
        return self.module.training_step(batch, 0)


def prepare_student(rows: int, length: int, mode: str, folder: Path, layout: Layout) -> Callable[[], object]:
    """Returns a step of a student in a layout."""
    train, mesh = TrainConfig(checkpointing=mode), build_mesh(layout, detect_device_type())
    model = load_in_layout(folder, AUTO, layout, mesh)
    stages = build_pipeline_trainer(model, layout, mesh)
    module = DistillationModule(
        model, loss=LossConfig(kl=0, ce=1), train=train, stages=stages, shard_optimizer=layout.zero == 1
    )
    module.to(model.device)
    module.on_fit_start()
    step: nn.Module = Step(module)
    if layout.processes > 1 and not layout.sharded and layout.zero != 2:
        step = DistributedDataParallel(step, gradient_as_bucket_view=True)
    optimizer = build_optimizer(model, [], train, shard=layout.zero == 1)
    batch = draw_batch(rows // layout.data_parallel, length, model.device)

    def take_step() -> None:
        if stages is None:
            step(batch).backward()
        else:
            train_stages(stages, batch, {}, {}, module.loss, 1)
            stages.average_gradients()
        optimizer.step()
        optimizer.zero_grad()

    return take_step


def prepare_teacher(rows: int, length: int, mode: str, folder: Path, layout: Layout) -> Callable[[], object]:
    """Returns a query of a frozen model in a layout."""
    model, teacher = load_teacher(folder, layout)
    for weight in model.parameters() if not layout.fsdp > 1 and not layout.tp > 1 else ():
        weight.data = weight.data.clone()  # as on a GPU; otherwise they are pages of the file, read when used
    batch = draw_batch(rows // layout.data_parallel, length, model.device)
    return lambda: teacher(batch)


PREPARE = {"student": prepare_student, "teacher": prepare_teacher}


def measure_peak(role: str, rows: int, length: int, mode: str, folder: Path, layout: Layout) -> MemoryUse:
    """Returns the memory of this process from before the model is loaded until some steps or queries are done."""
    gc.collect()
    with record_memory() as use:
        work = PREPARE[role](rows, length, mode, folder, layout)
        for _ in range(STEPS):
            work()
    return use


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
