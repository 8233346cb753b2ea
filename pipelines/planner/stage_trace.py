"""Memory, work and traffic of a model in pipeline stages: those of its largest stage, without the others.

A stage runs the micro-batches of a batch in the schedule's order, with tensors without data for what its neighbors
send. The busiest stage runs all micro-batches of a batch, and waits while one of them passes through the others: with p
equal stages, m micro-batches take as long as m + p - 1 (Huang et al. 2019, GPipe, arXiv 1811.06965, section 2.3).
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from distill.data.batches.encode import Batch
from distill.losses.compose import compute_loss_terms, weighted_sum
from distill.losses.config import LossConfig
from distill.models.inputs import select_inputs
from distill.parallel.layout import Layout
from distill.parallel.pipeline import MICRO_BATCHES, StageForward
from distill.parallel.pipeline_stage import reduce_to_stage, split_layers
from distill.tasks.logit_rows import OutputRows
from distill.train.activation_checkpointing import checkpoint_layers
from distill.train.optimizer import build_optimizer, take_empty_step
from distill.train.steps.batch_entries import find_signals
from pipelines.planner.depth_extrapolation import add_difference
from pipelines.planner.fake_process_group import SelectShare, use_kernels
from pipelines.planner.operator_counter import Collective, WorkCounter
from pipelines.planner.trace import (
    Query,
    StepTrace,
    StepTracker,
    Training,
    allocate_fake,
    build_on_meta,
    collect_trace,
    compute_in,
    count_held_bytes,
    count_vocabulary,
    list_tensors,
    trace_fake_tensors,
)


def count_micro_batches(rows: int) -> tuple[int, int]:
    """Returns the number of micro-batches of a batch, and the rows of each."""
    size = -(-rows // MICRO_BATCHES)
    return -(-rows // size), size


def trace_stages(work: Training | Query, layout: Layout, micro_batches: int, limit: float = math.inf) -> StepTrace:
    """Returns what the largest stage takes for a batch: the most memory and the most work of any.

    Args:
        work: The training or query, with batches of the rows of a micro-batch.
        layout: Layout with pipeline stages.
        micro_batches: Number of micro-batches.
        limit: Bytes of a process: stages after one that needs more aren't traced.
    """
    parts = split_layers(build_on_meta(work.build), layout.pp)
    traces: dict[int, StepTrace] = {}
    for index in list_extreme_stages(parts):
        traces[index] = extrapolate_stage(work, parts, micro_batches, index)
        if traces[index].peak > limit:
            break
    larger = max(traces.values(), key=lambda stage: stage.peak)
    busiest = max(traces, key=lambda index: traces[index].work.flops)
    layers = [len(part) for part in parts]
    stretch = 1 + (sum(layers) / layers[busiest] - 1) / micro_batches
    return replace(traces[busiest], memory=larger.memory, held_bytes=larger.held_bytes, stretch=stretch)


def list_extreme_stages(parts: Sequence[range]) -> list[int]:
    """Returns the indices of the stages that may need the most memory or work, those with the most layers first.

    They are the first, the last, and one of those between. These consist of layers only, so one with the most layers
    is enough: the earliest, which keeps the activations of the most micro-batches. The first stage needs more than
    that if it has as many layers.
    """
    last = len(parts) - 1
    between = max(range(1, last), key=lambda index: len(parts[index]), default=0)
    extremes = {0, last} | ({between} if len(parts[between]) > len(parts[0]) else set())
    return sorted(extremes, key=lambda index: (-len(parts[index]), index))


def extrapolate_stage(work: Training | Query, parts: Sequence[range], micro_batches: int, index: int) -> StepTrace:
    """Returns what a stage takes for a batch, from its traces with one and with two layers.

    Args:
        work: As in `trace_stages`.
        parts: Layers of all stages, from `split_layers`.
        micro_batches: As in `trace_stages`.
        index: Index of the stage.
    """
    layers = len(parts[index])
    if layers <= 2:  # as many as are traced
        return trace_stage(work, parts, micro_batches, index, layers)
    low, high = (trace_stage(work, parts, micro_batches, index, few) for few in (1, 2))
    return add_difference(low, low, high, layers - 1)


def trace_stage(
    work: Training | Query, parts: Sequence[range], micro_batches: int, index: int, layers: int
) -> StepTrace:
    """Returns what a stage takes for a batch with only this number of its layers."""
    stage, stages = build_on_meta(work.build), list(parts)
    stages[index] = parts[index][:layers] if index == 0 else parts[index][-layers:]
    reduce_to_stage(stage, stages, index)
    is_trained = isinstance(work, Training)
    stage.requires_grad_(is_trained).train(is_trained)
    kernels = use_kernels(work.backend) if isinstance(work, Training) else nullcontext()
    with trace_fake_tensors(), SelectShare(work.share), kernels:
        allocate_fake(stage)
        batch, optimizer = work.build_fake_batch(), None
        lone = LoneStage(stage, work.loss if isinstance(work, Training) else None)
        counter = WorkCounter(count_vocabulary(stage))
        memory = StepTracker(counter)
        with checkpoint_layers(stage, work.train.checkpointing if isinstance(work, Training) else "none"):
            if isinstance(work, Training):
                optimizer = build_optimizer(stage, [], work.train)
                take_empty_step(optimizer)
            memory.track_external(stage, *list_tensors(batch), *([] if optimizer is None else [optimizer]))
            with counter, memory:
                with compute_in(work.precision):
                    lone.run(batch, micro_batches, memory.forget_modules)
                if optimizer is not None:
                    optimizer.step()
                    optimizer.zero_grad()
        held_bytes = count_held_bytes(stage, optimizer)
    add_messages(counter, stage, batch, (1 + is_trained) * micro_batches)
    return collect_trace(memory, counter, held_bytes)


class LoneStage:
    """A stage without its neighbors.

    With at least as many micro-batches as stages the order is that of 1F1B, which keeps the activations of as many
    micro-batches as there are stages from this one on; otherwise GPipe's, which keeps all.

    Args:
        stage: From `reduce_to_stage`.
        loss: The loss; None for a frozen model.
    """

    def __init__(self, stage: PreTrainedModel, loss: LossConfig | None):
        self.forward, self.stage, self.loss = StageForward(stage), stage, loss

    def run(self, batch: Batch, micro_batches: int, before: Callable[[], None]) -> None:
        """Runs the passes of a batch that consists of equal micro-batches; `before` is called before each of them."""
        boundary, waiting = self.forward.boundary, deque[Tensor]()
        in_flight = boundary.count - boundary.index if micro_batches >= boundary.count else micro_batches
        for _ in range(micro_batches):
            before()
            with torch.set_grad_enabled(self.loss is not None):
                output = self._run_forward(batch)
            if self.loss is None:
                continue
            waiting.append(output)
            if len(waiting) == in_flight:
                run_backward(waiting.popleft())
        while waiting:
            run_backward(waiting.popleft())

    def _run_forward(self, batch: Batch) -> Tensor:
        """Returns the loss in the last stage, in the others the hidden states."""
        inputs: dict[str, Any] = dict(select_inputs(batch))
        shape = (*inputs["input_ids"].shape, self.stage.config.hidden_size)
        if self.forward.boundary.is_first:
            received = inputs.pop("input_ids")
        else:
            received = torch.empty(shape, requires_grad=self.loss is not None)
        output: Tensor = self.forward(received, **inputs)
        if not self.forward.boundary.is_last or self.loss is None:
            return output
        rows, signals = OutputRows(), find_signals(batch) or {}
        logits = rows.logits(batch, self.forward.logits.pop())
        terms = compute_loss_terms(
            self.loss, logits, rows.labels(batch), batch["attention_mask"], rows.signals(batch, signals)
        )
        return weighted_sum(self.loss, terms)


def run_backward(output: Tensor) -> None:
    """Runs a backward pass from a loss, or from hidden states whose gradients the next stage has sent."""
    output.backward(None if output.dim() == 0 else torch.empty_like(output))


def add_messages(counter: WorkCounter, stage: PreTrainedModel, batch: Batch, messages: int) -> None:
    """Adds the hidden states that are sent to a neighbor, or their gradients."""
    neighbors = Collective("send", (0, 1), waits=True)
    counter.sent[neighbors] += messages * batch["input_ids"].numel() * stage.config.hidden_size * 4
    counter.calls[neighbors] += messages
