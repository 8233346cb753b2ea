"""Memory, work and traffic of a training step in a layout, from running the run's own code on tensors without data.

The model is built and sharded as in a run, in a world of one process that stands for all; then a step is taken on
fake tensors, which have shapes and no memory. So a layout on 64 GPUs is traced on a laptop, in about a second.

Sources: torch.distributed._tools.mem_tracker for the memory, torch.utils.flop_counter for the work of an operator.
Deviation: the step is that of a CPU, whose fused attention keeps what a GPU's keeps.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import PreTrainedModel

from distill.data.batches.encode import Batch
from distill.losses.config import LossConfig
from distill.parallel.apply import apply_layout
from distill.parallel.layout import Layout
from distill.parallel.load import allocate_parameters, parameters_on_meta
from distill.parallel.mesh import build_mesh
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from distill.train.optimizer import build_optimizer, take_empty_step

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


@dataclass(frozen=True)
class StepTrace:
    """What a process takes for a step.

    Args:
        memory: Bytes at the moment when most are in use: weights (gathered ones too), gradients, optimizer,
            activations, and buffers.
        flops: Floating-point operations.
        sent: Kind of collective -> bytes of its results.
    """

    memory: Mapping[str, int]
    flops: int
    sent: Mapping[str, int]

    @property
    def peak(self) -> int:
        """Bytes at most."""
        return sum(self.memory.values())


@contextmanager
def simulate_world(processes: int) -> Iterator[None]:
    """Makes this process the first of a world in which collectives return at once, without sending anything."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
    try:
        yield
    finally:
        dist.destroy_process_group()


def trace_step(
    build: Callable[[], PreTrainedModel],
    draw_batch: Callable[[], Batch],
    layout: Layout,
    train: TrainConfig,
    loss: LossConfig | None = None,
) -> StepTrace:
    """Returns what a training step takes for the first process of a layout, in a world from `simulate_world`.

    Args:
        build: Builds the student; its weights aren't allocated.
        draw_batch: Draws the batch of one process.
        layout: Layout without pipeline stages.
        train: The optimizer, and activation checkpointing.
        loss: The loss; the labels' by default.
    """
    with parameters_on_meta():
        model = build()
    apply_layout(model, layout, build_mesh(layout, "cpu"))
    module = DistillationModule(model.train(), loss=loss or LossConfig(kl=0, ce=1), train=train)
    counter = WorkCounter()
    with FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # modules that end before their hooks are no fault here
        allocate_parameters(model, _CPU, _CPU)
        batch = draw_batch()
        optimizer = build_optimizer(model, [], train)
        take_empty_step(optimizer)
        memory = MemTracker()
        memory.track_external(model, optimizer, *batch.values())
        module.on_fit_start()

        def take_step() -> None:
            result = module.training_step(batch, 0)
            assert result is not None
            result.backward()
            optimizer.step()
            optimizer.zero_grad()

        with SelectAll():
            if layout.tp > 1:  # sharded operators run once more the first time, on whole tensors
                take_step()
            with memory, counter:
                take_step()
    found: Counter[str] = Counter()
    for categories in memory.get_tracker_snapshot("peak").values():
        for kind, count in categories.items():
            name = CATEGORIES.get(getattr(kind, "value", str(kind)))
            if name is not None:
                found[name] += count
    return StepTrace(dict(found), counter.flops, dict(counter.sent))


class WorkCounter(TorchDispatchMode):
    """Counts a process's floating-point operations and the bytes of the results of its collective operations.

    `FlopCounterMode` counts the same work, but for all processes of a sharded product together, and it keeps
    activations in memory that a training frees.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops, self.sent = 0, Counter[str]()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs an operator and counts it; one of a sharded tensor comes back as that of this process's part."""
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        packet = getattr(function, "_overloadpacket", None)
        if packet in flop_registry:
            self.flops += flop_registry[packet](*args, **kwargs, out_val=result)
        space, _, name = str(function).partition(".")
        if space in ("c10d", "_c10d_functional") and not name.startswith("wait"):
            tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            self.sent[name.partition(".")[0].strip("_")] += sum(leaf.numel() * leaf.element_size() for leaf in tensors)
        return result


class SelectAll(TorchFunctionMode):
    """Makes masks select everything: without data it is unknown how much they would select, and memory is for most."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs a function; those of masks answer as if every element were true."""
        if function is Tensor.__getitem__ and isinstance(args[1], Tensor) and args[1].dtype == torch.bool:
            return args[0].flatten(0, args[1].dim() - 1)
        if function is Tensor.all:
            return True
        return function(*args, **(kwargs or {}))
