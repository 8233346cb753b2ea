"""Memory, work and traffic of a step in a layout, from running the run's own code on tensors without data.

The model is built and sharded as in a run, in a world of one process that stands for all; then a step is taken on
fake tensors, which have shapes and no memory. So a layout on 64 GPUs is traced on a laptop, in about a second.

Sources: torch.distributed._tools.mem_tracker for the memory, torch.utils.flop_counter for the work of an operator.
Deviations: the step is that of a CPU, with dropout that keeps what a GPU's keeps where GPUs are planned; replicas get
the gradient buffers and the all-reduce of DistributedDataParallel by arithmetic.
"""

import gc
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import _TOTAL_KEY, MemTracker, _MemRefType
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from distill.data.batches.encode import Batch
from distill.losses.config import LayerSizes, LossConfig
from distill.parallel.apply import apply_layout, reshard
from distill.parallel.layout import Layout
from distill.parallel.load import allocate_parameters
from distill.parallel.mesh import build_mesh
from distill.tasks.logit_rows import OutputRows
from distill.teacher.online import OnlineTeacher
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from distill.train.optimizer import build_optimizer, take_empty_step
from pipelines.planner.fake_process_group import SelectShare, use_kernels
from pipelines.planner.operator_counter import Collective, OperatorWork, WorkCounter, asks_device
from pipelines.runs.placement import find_gather_policy

CATEGORIES = {
    "Parameter": "weights",
    "Buffer": "weights",
    "Gradient": "gradients",
    "Optstate": "optimizer",
    "Activation": "activations",
    "Temp": "buffers",
    "Other": "buffers",
}
_CPU = torch.device("cpu")
_HALF = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


@dataclass(frozen=True)
class StepTrace:
    """What a process takes for a step.

    Args:
        memory: Bytes at the moment when most are in use: weights (gathered ones too), gradients, optimizer,
            activations, logits, and buffers.
        held_bytes: Bytes between steps: weights, optimizer states, and gradients that are kept.
        work: What the operators of this process do.
        sent: Collective -> bytes of its results.
        calls: Collective -> how often it is called.
        stretch: How many times as long the step takes as the work of this process, where others keep it waiting.
    """

    memory: Mapping[str, int]
    held_bytes: int
    work: OperatorWork
    sent: Mapping[Collective, int]
    calls: Mapping[Collective, int]
    stretch: float = 1.0

    @property
    def peak(self) -> int:
        """Bytes at most."""
        return sum(self.memory.values())


@dataclass(frozen=True)
class Training:
    """A student's training, but for its layout.

    Args:
        build: Builds the student; its weights aren't allocated.
        build_fake_batch: Draws the batch of one process, with the teacher's signals if terms of the loss need them.
        loss: The loss; the labels' by default.
        train: The optimizer, and activation checkpointing.
        precision: 32, bf16-mixed or 16-mixed.
        output_rows: As in `DistillationModule`.
        teacher_sizes: As in `DistillationModule`.
        share: Share of the positions at which the student predicts.
        backend: What sends: nccl or gloo.
    """

    build: Callable[[], PreTrainedModel]
    build_fake_batch: Callable[[], Batch]
    loss: LossConfig = field(default_factory=lambda: LossConfig(kl=0, ce=1))
    train: TrainConfig = field(default_factory=TrainConfig)
    precision: str = "32"
    output_rows: OutputRows | None = None
    teacher_sizes: LayerSizes | None = None
    share: float = 1.0
    backend: str = "nccl"


@dataclass(frozen=True)
class Query:
    """A frozen teacher's queries, but for its layout.

    Args:
        build: Builds the teacher; its weights aren't allocated.
        build_fake_batch: Draws the batch of one process.
        outputs: As in `OnlineTeacher`.
        precision: 32, bf16-mixed or 16-mixed.
        share: Share of the positions at which the teacher predicts.
    """

    build: Callable[[], PreTrainedModel]
    build_fake_batch: Callable[[], Batch]
    outputs: tuple[str, ...] = ("logits",)
    precision: str = "32"
    share: float = 1.0


class StepTracker(MemTracker):
    """`MemTracker` for a step as a whole, without its slow statistics of modules, and for models with frozen weights.

    Its hooks keep tensors of a past step in reference cycles. Garbage has to be collected before the next step, or its
    memory depends on when Python happens to do so.

    Args:
        counter: Knows how much of the memory is logits.
        copies: Whether a reduce-scatter copies all of its input, as gloo's does.

    Attributes:
        logits: Bytes of logits at the moment when most memory is in use.
    """

    def __init__(self, counter: WorkCounter, *, copies: bool = False):
        super().__init__()
        self.counter, self.copies, self.logits = counter, copies, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs an operator and counts its memory."""
        if asks_device(func, args):  # more than half of all calls
            return args[0].fake_device
        if any(issubclass(each, DTensor) for each in types):  # this mode runs first: the counter doesn't see them
            self.counter.sharded += 1
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _track_module_params_and_buffers(self, module: nn.Module, install_grad_hooks: bool = True) -> tuple[int, int]:
        """Counts a module's weights; a frozen one can't have a hook, and parts that are trained have their own."""
        is_trained = all(each.requires_grad for each in module.parameters())
        return super()._track_module_params_and_buffers(module, install_grad_hooks and is_trained)

    def forget_modules(self) -> None:
        """Forgets the modules that have run, and the tensors that hooks on them keep, before they run again."""
        self.reset_mod_stats()
        gc.collect()

    def _update_peak_stats(self, peak_state: object) -> None:
        """Keeps what is in use if it is more than ever before."""
        copied = self.counter.scattered if self.copies else 0
        for device, now in self._curr_mem_snap.items():
            total = now[_TOTAL_KEY] + copied
            if self._peak_mem.get(device, 0) < total:
                temporary = now[_MemRefType.TEMP] + copied
                self._peak_mem[device] = total
                self._peak_mem_snap[device] = {**now, _MemRefType.TEMP: temporary, _TOTAL_KEY: total}
                self.logits = self.counter.logits


def trace_step(training: Training, layout: Layout, *, is_new: bool = True) -> StepTrace:
    """Returns what a training step takes for the first process of a layout without pipeline stages.

    Args:
        training: What is trained.
        layout: The layout, on all processes of a world from `simulate_world`.
        is_new: Whether no model with layers of these shapes was traced in this layout before. Operators on sharded
            tensors run twice the first time, on whole tensors too, which isn't counted.
    """
    model = build_sharded(training.build, layout, training.precision, frozen=False)
    module = DistillationModule(
        model.train(),
        loss=training.loss,
        train=training.train,
        output_rows=training.output_rows,
        teacher_sizes=training.teacher_sizes,
        shard_optimizer=layout.zero == 1,
    )
    is_replicated = layout.processes > 1 and not layout.shards_gradients
    with trace_fake_tensors(), SelectShare(training.share), use_kernels(training.backend):
        allocate_fake(model)
        batch = training.build_fake_batch()
        terms = list(module.layer_terms.parameters())
        optimizer = build_optimizer(model, terms, training.train, shard=layout.zero == 1)
        take_empty_step(optimizer)
        module.on_fit_start()

        def take_step() -> None:
            with compute_in(training.precision):
                result = module.training_step(batch, 0)
            assert result is not None
            result.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=not is_replicated)  # DDP keeps its buckets

        if layout.tp > 1 and is_new:
            take_step()
            gc.collect()
        if is_replicated:  # DDP's buckets
            for weight in model.parameters():
                weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
        counter = WorkCounter(count_classes(model, layout))
        memory = StepTracker(counter, copies=training.backend == "gloo")
        local_optimizer = getattr(optimizer, "optim", optimizer)  # this process's part of a ZeroRedundancyOptimizer
        memory.track_external(model, local_optimizer, *list_tensors(batch))
        with counter, memory:
            take_step()
        reshard(model)
        held_bytes = count_held_bytes(model, local_optimizer)
        if is_replicated:
            add_gradient_sums(counter, model, layout)
    return collect_trace(memory, counter, held_bytes)


def trace_query(query: Query, layout: Layout, *, is_new: bool = True) -> StepTrace:
    """Returns what a query takes for the first process of a layout without pipeline stages, as in `trace_step`."""
    model = build_sharded(query.build, layout, query.precision, frozen=True)
    with trace_fake_tensors(), SelectShare(query.share):
        allocate_fake(model)
        batch = query.build_fake_batch()
        teacher = OnlineTeacher(model, query.outputs, device=_CPU)

        def ask() -> None:
            with compute_in(query.precision):
                teacher(batch)

        if layout.tp > 1 and is_new:
            ask()
            gc.collect()
        counter = WorkCounter(count_classes(model, layout))
        memory = StepTracker(counter)
        memory.track_external(model, *list_tensors(batch))
        with counter, memory:
            ask()
        reshard(model)
        held_bytes = count_held_bytes(model)
    return collect_trace(memory, counter, held_bytes)


def build_sharded(
    build: Callable[[], PreTrainedModel], layout: Layout, precision: str, *, frozen: bool
) -> PreTrainedModel:
    """Returns a model in its layout, without memory for its weights."""
    model = build_on_meta(build)
    model.requires_grad_(not frozen)
    policy = find_gather_policy(precision)
    return apply_layout(model, layout, build_mesh(layout, "cpu"), exact=frozen, policy=policy)


def build_on_meta(build: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """Returns a model without memory for its weights, in an instant for any size."""
    with torch.device("meta"):
        return build()


def allocate_fake(model: nn.Module) -> None:
    """Replaces weights and buffers on the meta device by fake ones."""
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(module, name, torch.empty_like(buffer, device=_CPU))
    allocate_parameters(model, _CPU, _CPU)


@contextmanager
def trace_fake_tensors() -> Iterator[None]:
    """Makes new tensors fake ones, and leaves what is there already out of garbage collections, which are so quick."""
    gc.freeze()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # modules that end before their hooks are no fault here
            yield
    finally:
        gc.unfreeze()


def compute_in(precision: str) -> torch.autocast:
    """Returns the context in which a step of this precision computes."""
    return torch.autocast("cpu", _HALF.get(precision, torch.bfloat16), enabled=precision in _HALF)


def count_classes(model: PreTrainedModel, layout: Layout) -> int:
    """Returns the width of a vocabulary's logits on a process."""
    vocabulary = count_vocabulary(model)
    return vocabulary // layout.tp if vocabulary % layout.tp == 0 else vocabulary


def count_vocabulary(model: PreTrainedModel) -> int:
    """Returns the size of a model's vocabulary."""
    return int(getattr(model.config.get_text_config(), "vocab_size", 0))


def list_tensors(batch: object) -> Iterator[Tensor]:
    """Yields the tensors of a batch, those of its signals too."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping | list | tuple):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from list_tensors(value)


def count_held_bytes(model: nn.Module, optimizer: Optimizer | None = None) -> int:
    """Returns the bytes of weights, buffers, gradients and optimizer states on this process."""
    weights = list(model.parameters())
    gradients = [each.grad for each in weights if each.grad is not None]
    states = [] if optimizer is None else [value for state in optimizer.state.values() for value in state.values()]
    return count_tensor_bytes([*weights, *model.buffers(), *gradients, *list_tensors(states)])


def count_tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of tensors, or of this process's part of them; storages that are shared count once."""
    local = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    storages = {id(each.untyped_storage()): each.untyped_storage().nbytes() for each in local}
    return sum(storages.values())


def add_gradient_sums(counter: WorkCounter, model: nn.Module, layout: Layout) -> None:
    """Adds the all-reduce of the gradients of replicas, which DistributedDataParallel sends in buckets of 25 MiB."""
    size = sum(each.numel() * each.element_size() for each in model.parameters() if each.requires_grad)
    everyone = Collective("all_reduce", tuple(range(dist.get_world_size())), waits=False)
    counter.sent[everyone] += size
    counter.calls[everyone] += -(-size // (25 << 20))


def collect_trace(memory: StepTracker, counter: WorkCounter, held_bytes: int) -> StepTrace:
    """Returns what was traced; logits are taken out of the activations and buffers that they are part of."""
    sizes: Counter[str] = Counter()
    for categories in memory.get_tracker_snapshot("peak").values():
        for kind, count in categories.items():
            name = CATEGORIES.get(getattr(kind, "value", str(kind)))
            if name is not None:
                sizes[name] += count
    for name in ("activations", "buffers"):
        share = min(sizes[name], memory.logits - sizes["logits"])
        sizes[name] -= share
        sizes["logits"] += share
    return StepTrace(dict(sizes), held_bytes, counter.work, dict(counter.sent), dict(counter.calls))
