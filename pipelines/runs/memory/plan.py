"""How a training fits into a memory budget: parts of a batch, checkpointing or offload of activations, low-bit states.

Each way is measured on the longest rows of the data; the fastest that fits is chosen. All but the low-bit states train
the same weights, up to rounding.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from compress.measure.memory import return_freed_memory
from distill.checkpoint.layers import find_layer_lists
from distill.data.batches.data_module import RowsDataModule
from distill.errors import InputError
from distill.train.activation_checkpointing import FULL, NONE, SELECTIVE
from distill.train.config import AUTO, Offload, TrainConfig
from distill.train.module import DistillationModule
from distill.train.optimizer import build_optimizer
from pipelines.runs.console import Console
from pipelines.runs.files import write_json
from pipelines.runs.manifest import OPTIMIZER_BITS
from pipelines.runs.memory.budget import read_held_memory, resolve_memory_budget
from pipelines.runs.memory.step_cost import (
    LongestRows,
    PassCost,
    find_device,
    measure_in_training,
    measure_optimizer,
)
from pipelines.runs.processes import World
from pipelines.runs.trainer_state import Metrics
from pipelines.runs.training_job import TrainingJob

FILE = "memory.json"
_MARGIN = 0.1  # of what a training is predicted to need above what the process holds already
_GROWTH = 4 << 20  # bytes that the process may hold more after the measurements of plans than before
# Bytes of AdamW's states for a parameter, with the scales of their blocks; only if nothing else fits.
LOW_BIT_STATES = {"adamw-8bit": 2.07, "adamw-4bit": 1.09}
STATE_BITS = {"adamw-8bit": 8, "adamw-4bit": 4}


@dataclass(frozen=True)
class MemoryPlan:
    """A way to train, with what it takes.

    Args:
        checkpointing: Mode of activation checkpointing.
        parts: Number of micro-batches of a batch.
        optimizer: Name of the optimizer.
        peak: Bytes that the process is predicted to hold at most.
        seconds: Measured time of the passes of a batch of the longest rows; 0 if it doesn't fit.
        offload: What is offloaded.
    """

    checkpointing: str
    parts: int
    optimizer: str
    peak: int
    seconds: float = 0.0
    offload: Offload = "none"

    def apply(self, module: DistillationModule, data: RowsDataModule) -> None:
        """Gives the settings to a training."""
        module.train_config = replace(
            module.train_config, checkpointing=self.checkpointing, optimizer=self.optimizer, offload=self.offload
        )
        module.micro_batches.parts = data.parts = self.parts


def fit_into_memory(module: DistillationModule, data: RowsDataModule, folder: Path, job: TrainingJob) -> Metrics:
    """Applies the plan of the stage's folder to a training, or chooses, prints and stores one; every process calls it.

    A training that started with a plan resumes with it, even without a budget, because its checkpoints hold the states
    of that plan's optimizer. Otherwise nothing is done if neither a budget nor `auto` is set.

    Args:
        module, data: What is trained on what.
        folder: Where the plan is stored.
        job: The training, whose machine has the budget.

    Returns:
        The bits of the optimizer's states, if the plan has fewer than the settings; otherwise no metrics.

    Raises:
        InputError: Nothing fits.
    """
    train, file = module.train_config, folder / FILE
    world, memory, shares = job.world, job.machine.memory, job.layout.data_parallel
    stored = world.broadcast(json.loads(file.read_text()) if world.is_rank_zero and file.exists() else None)
    if stored is None:
        if not (memory or AUTO in (train.checkpointing, train.batch_size)):
            return {}
        budget = resolve_memory_budget(memory or AUTO, find_device(module), world.size)
        budget = min(world.gather(budget))
        planner = MemoryPlanner(module, data, budget, world, shares, job.precision, adapts=bool(memory))
        plans = planner.list_plans()
        chosen = choose_plan(plans, is_required=bool(memory))
        print_plans(job.console, job.label, plans, chosen, budget)
        if chosen is None:
            raise no_plan_error(plans, budget, job.label)
        stored = asdict(chosen)
        if world.is_rank_zero:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, stored)
    elif stored["optimizer"] != train.optimizer:
        job.console.say(f"  {job.label}: resumes with {stored['optimizer']}, which was chosen to fit a memory limit")
    plan = MemoryPlan(**stored)
    plan.apply(module, data)
    return {} if plan.optimizer == train.optimizer else {OPTIMIZER_BITS: STATE_BITS[plan.optimizer]}


class MemoryPlanner:
    """Measures the ways in which a training may be carried out.

    Args:
        module: The training; its weights stay the same.
        data: Its batches.
        budget: Bytes that a process may hold.
        world: The processes, which measure together and choose the same.
        shares: Number of processes that share the rows of a batch.
        precision: Name of the precision.
        adapts: Whether checkpointing, offload and optimizer may be changed, and not only the parts of a batch.
    """

    def __init__(
        self,
        module: DistillationModule,
        data: RowsDataModule,
        budget: int,
        world: World,
        shares: int = 1,
        precision: str = "32",
        *,
        adapts: bool = True,
    ):
        self.module, self.world, self.precision, self.adapts = module, world, precision, adapts
        self.train, self.device = module.train_config, find_device(module)
        self.longest = LongestRows(module, data, -(-count_longest_rows(data, self.train) // shares))
        self.costs: dict[tuple[str, str, int], PassCost] = {}  # by checkpointing, offload and rows
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.gradients = sum(parameter.nbytes for parameter in trained)
        self.numbers = sum(parameter.numel() for parameter in trained)
        # The first pass loads kernels, which take memory once.
        measure_in_training(module, self.longest.build_batch(1), NONE, precision=precision)
        self.budget, self.held_bytes = budget, 0
        self.states = self._measure_states()
        self._update_held()

    @property
    def allowed(self) -> int:
        """Bytes that a plan may be predicted to take at most."""
        return self.held_bytes + int((self.budget - self.held_bytes) / (1 + _MARGIN))

    @property
    def rows(self) -> int:
        """Rows of this process's share of a batch of the longest ones."""
        return len(self.longest)

    def list_plans(self) -> list[MemoryPlan]:
        """Returns the best plan of each mode, or only the training as it is if that fits.

        Activations are offloaded only if no plan without it fits, and AdamW's states have fewer bits only if no plan
        that trains the same weights fits.
        """
        while True:
            before = self.held_bytes
            plans = self._list_plans()
            if self.held_bytes <= before + _GROWTH:
                return plans

    def _list_plans(self) -> list[MemoryPlan]:
        """Returns the plans for the memory that the process held so far; measurements may raise it."""
        train_optimizer, plans = self.train.optimizer, list[MemoryPlan]()
        for mode in self.list_modes():
            plans.append(self.plan_mode(mode, self.train.offload, train_optimizer))
            if plans[0].parts == 1 and plans[0].seconds:
                return plans
        if not _any_fits(plans) and self.may_offload:
            plans += [self.plan_mode(mode, "activations", train_optimizer) for mode in self.list_modes()]
        for optimizer in LOW_BIT_STATES:
            if _any_fits(plans) or not self.may_reduce_states:
                break
            pairs = [(plan.checkpointing, plan.offload) for plan in plans if plan.optimizer == train_optimizer]
            plans += [self.plan_mode(*pair, optimizer) for pair in pairs]
        return plans

    @property
    def may_offload(self) -> bool:
        """Whether activations can be offloaded without changing the result."""
        return self.adapts and self.train.offload != "activations" and self.device.type in ("cpu", "cuda")

    @property
    def may_reduce_states(self) -> bool:
        """Whether low-bit states can replace the optimizer's: they need one process and AdamW's rate."""
        return self.adapts and self.train.optimizer == "adamw" and self.world.size == 1

    def list_modes(self) -> list[str]:
        """Returns the modes of checkpointing to choose from; a mode that the settings name isn't changed."""
        if self.train.checkpointing != AUTO and not (self.adapts and self.train.checkpointing == NONE):
            return [self.train.checkpointing]
        return [NONE, SELECTIVE, FULL] if find_layer_lists(self.module.student) else [NONE]

    def list_parts(self) -> Iterator[int]:
        """Yields the numbers of micro-batches to choose from, in ascending order."""
        parts = 1
        while parts < 2 * self.rows:
            yield min(parts, self.rows)
            if self.world.size > 1 or not self.module.can_split_batches:
                return
            parts *= 2

    def plan_mode(self, mode: str, offload: Offload, optimizer: str) -> MemoryPlan:
        """Returns the plan of a way to train with the fewest parts that fit, or with the most if none does."""
        one, two = (self._measure(mode, offload, rows).later for rows in (1, min(2, self.rows)))
        for parts in self.list_parts():
            rows = -(-self.rows // parts)
            later = one + (rows - 1) * (two - one)
            peak = self.predict_peak(PassCost(self.gradients + later, later, 0.0), parts, optimizer)
            if peak > self.allowed:
                continue
            cost = self._measure(mode, offload, rows)
            peak = self.predict_peak(cost, parts, optimizer)
            if peak <= self.allowed:
                return MemoryPlan(mode, parts, optimizer, peak, parts * cost.seconds, offload)
        return MemoryPlan(mode, parts, optimizer, peak, offload=offload)

    def predict_peak(self, cost: PassCost, parts: int, optimizer: str) -> int:
        """Returns the bytes that a training holds at most, from the cost of its micro-batches' passes."""
        passes = cost.first if parts == 1 else self.gradients + cost.later
        states, step_peak = self.find_states(optimizer)
        return self.held_bytes + max(states + self._kept_gradients + passes, self.gradients + step_peak)

    def find_states(self, optimizer: str) -> tuple[int, int]:
        """Returns the bytes of an optimizer's states, and of a step that creates them; computed for low-bit ones."""
        if optimizer == self.train.optimizer:
            return self.states
        states = int(LOW_BIT_STATES[optimizer] * self.numbers)
        return states, states

    @property
    def _kept_gradients(self) -> int:
        """Bytes of the gradients of earlier batches of an accumulation."""
        return self.gradients if self.train.accumulate > 1 or self.module.grows else 0

    def _measure(self, mode: str, offload: Offload, rows: int) -> PassCost:
        """Returns the cost of a micro-batch of the longest rows, that of the slowest and largest process."""
        key = mode, offload, rows
        if key not in self.costs:
            batch = self.longest.build_batch(rows)
            cost = measure_in_training(self.module, batch, mode, offload, self.precision)
            largest = self._agree(cost.first), self._agree(cost.later)
            self.costs[key] = PassCost(*largest, max(self.world.gather(cost.seconds)))
            self._update_held()
        return self.costs[key]

    def _update_held(self) -> None:
        """Notes what the process holds without the training; passes of new shapes load code that stays."""
        return_freed_memory()
        self.held_bytes = max(self.held_bytes, self._agree(read_held_memory(self.device)))

    def _measure_states(self) -> tuple[int, int]:
        """Returns the bytes of the optimizer's states, and of a step that creates them."""
        optimizer = build_optimizer(
            self.module.student,
            self.module.layer_terms.parameters(),
            self.train,
            shard=self.module.shard_optimizer,
            stochastic_rounding=self.module.stochastic_rounding,
        )
        for parameter in self.module.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        states, peak = measure_optimizer(optimizer, self.device)
        self.module.zero_grad()
        return self._agree(states), self._agree(peak)

    def _agree(self, value: int) -> int:
        return max(self.world.gather(value))


def _any_fits(plans: list[MemoryPlan]) -> bool:
    return any(plan.seconds for plan in plans)


def count_longest_rows(data: RowsDataModule, train: TrainConfig) -> int:
    """Returns the number of rows of a batch of the longest ones."""
    counts_rows = not train.batch_tokens or data.sampler is not None
    rows = train.rows if counts_rows else max(1, train.batch_tokens // int(data.train.lengths.max()))
    return min(rows, len(data.train))


def choose_plan(plans: list[MemoryPlan], *, is_required: bool = True) -> MemoryPlan | None:
    """Returns the fastest plan that fits; if none does, None, or the smallest if the budget isn't required."""
    fitting = [plan for plan in plans if plan.seconds]
    if fitting:
        return min(fitting, key=lambda plan: plan.seconds)
    return None if is_required else min(plans, key=lambda plan: plan.peak)


def no_plan_error(plans: list[MemoryPlan], budget: int, label: str) -> InputError:
    """Returns the error for a budget that no plan fits into."""
    least = min(plans, key=lambda plan: plan.peak)
    return InputError(
        f"machine.memory: expected more than {least.peak / 1e6:,.0f} MB for {label!r}, which {least.checkpointing} "
        f"checkpointing, offload {least.offload}, {least.optimizer} and {least.parts} micro-batches are predicted to "
        f"take, found {budget / 1e6:,.0f} MB: nothing that is left to try fits; use a smaller model, a lower "
        "data.max_length or more memory"
    )


def print_plans(console: Console, label: str, plans: list[MemoryPlan], chosen: MemoryPlan | None, budget: int) -> None:
    """Prints the table that the plan was chosen from."""
    console.table(
        f"{label}: memory for at most {budget / 1e6:,.0f} MB",
        ("checkpointing", "offload", "optimizer", "micro-batches", "predicted peak", "batch of the longest rows", ""),
        [
            (
                plan.checkpointing,
                plan.offload,
                plan.optimizer,
                str(plan.parts),
                f"{plan.peak / 1e6:,.0f} MB",
                f"{plan.seconds:.2f} s" if plan.seconds else "doesn't fit",
                "chosen" if plan == chosen else "",
            )
            for plan in plans
        ],
    )
