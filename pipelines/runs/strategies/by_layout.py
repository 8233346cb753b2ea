"""Lightning strategies: one process, replicas (DDP, ZeRO-1, CP), students on a mesh (FSDP2, TP, 2D, HSDP, pipeline).

They save and restore through `pipelines.runs.training_checkpoint`: each process its own shards, in any layout.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Protocol, cast

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from distill.parallel.layout import Layout
from distill.parallel.mesh import find_data_rank, find_segment
from distill.parallel.plain_parameters import average_gradients, broadcast_parameters
from distill.train.module import DistillationModule
from pipelines.runs.strategies.deepspeed import ZeroStrategy, build_settings
from pipelines.runs.strategies.gradient_compression import register_compression
from pipelines.runs.training_checkpoint import LightningState, load_training, save_training
from pipelines.settings.commands.distill import MachineConfig


class RunStrategy(Protocol):
    """What a run uses of its strategies beside Lightning's interface."""

    @property
    def saving(self) -> Future[None] | None:
        """A future that is done when the newest checkpoint is on disk."""

    def gather_weights(self, module: nn.Module) -> AbstractContextManager[None]:
        """Returns a context in which all weights can be read or set."""

    def restore_weights(self, module: nn.Module) -> None:
        """Replaces weights in a format of the strategy by plain ones after training."""


def find_strategy(trainer: Trainer) -> RunStrategy:
    """Returns the trainer's strategy, which `build_strategy` made."""
    return cast(RunStrategy, trainer.strategy)


class PortableStrategy(Strategy):
    """Replaces Lightning's checkpoints by those of `pipelines.runs.training_checkpoint`, written asynchronously.

    `saving` is done when the newest checkpoint is on disk.
    """

    saving: Future[None] | None = None
    # A separate group, so that a checkpoint's collectives don't interleave with those of training.
    save_group: dist.ProcessGroup | None = None

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether Lightning loads the checkpoint after the model is on its devices: always."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether Lightning restores the optimizers: never, because `load_checkpoint` does."""
        return False

    def lightning_module_state_dict(self) -> LightningState:
        """Returns no weights for Lightning's checkpoint, because `save_checkpoint` writes them."""
        return {}

    def optimizer_state(self, optimizer: Optimizer) -> LightningState:
        """Returns no state for Lightning's checkpoint, because `save_checkpoint` writes it."""
        return {}

    def save_checkpoint(self, checkpoint: LightningState, filepath: str | Path, storage_options: object = None) -> None:
        """Starts to write a checkpoint folder; `saving` is done when it is complete."""
        if dist.is_initialized() and self.save_group is None:
            self.save_group = dist.new_group(backend="gloo")
        self.saving = save_training(Path(filepath), self._module, self.optimizers, checkpoint, group=self.save_group)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> LightningState:
        """Loads weights and optimizers in place, and returns the rest of the checkpoint for Lightning."""
        return load_training(Path(checkpoint_path), self._module, self.optimizers)

    def load_model_state_dict(self, checkpoint: Mapping[str, object], strict: bool = True) -> None:
        """Does nothing; `load_checkpoint` loads the weights."""

    def gather_weights(self, module: nn.Module) -> AbstractContextManager[None]:
        """Returns a context that does nothing: each process only needs its own shards."""
        return nullcontext()

    def restore_weights(self, module: nn.Module) -> None:
        """Does nothing; the weights are plain tensors."""

    @property
    def _module(self) -> nn.Module:
        if self.lightning_module is None:
            raise RuntimeError("the strategy has no module yet: checkpoints exist only while the trainer fits one")
        return self.lightning_module


class SingleProcessStrategy(PortableStrategy, SingleDeviceStrategy):
    """Strategy for a single device, on which a batch may be trained in parts."""

    splits_batches = True


class ReplicatedStrategy(PortableStrategy, DDPStrategy):
    """A replica on every process; gradients are averaged after the last batch of a step.

    Args:
        compress: Format in which gradients are sent: none, fp16, bf16 or powersgd.
        bucket_mb: Size in MiB of the gradient buckets that are sent together.
    """

    def __init__(self, *, compress: str, bucket_mb: int):
        super().__init__(bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)
        self.compress = compress

    def configure_ddp(self) -> None:
        """Wraps the module, and has DDP look for parameters without a gradient in a step if there may be any.

        DDP would wait for their gradients otherwise, and looking for them costs a pass through the graph in each step.
        """
        loss = cast(DistillationModule, self._module).loss
        self._ddp_kwargs["find_unused_parameters"] = not loss.trains_every_parameter
        super().configure_ddp()

    def _register_ddp_hooks(self) -> None:
        """Registers the compression hook, which Lightning silently skips on devices other than CUDA."""
        register_compression(cast(DistributedDataParallel, self.model), self.compress)


class MeshSampling:
    """Sampler settings of processes on a mesh, some of which read the same rows."""

    mesh: DeviceMesh

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """The rank of this process among those that read different rows, and their number."""
        rank, ranks = find_data_rank(self.mesh)
        return {"num_replicas": ranks, "rank": rank}


class SegmentStrategy(MeshSampling, ReplicatedStrategy):
    """A replica on every process, some of which have segments of the same rows.

    Args:
        mesh: The mesh of the student's layout.
        compress, bucket_mb: As in `ReplicatedStrategy`.
    """

    def __init__(self, mesh: DeviceMesh, *, compress: str, bucket_mb: int):
        super().__init__(compress=compress, bucket_mb=bucket_mb)
        self.mesh, self.segment = mesh, find_segment(mesh)


class MeshStrategy(MeshSampling, PortableStrategy, ModelParallelStrategy):
    """A student whose parameters are already on the mesh; its parallel modules reduce the gradients.

    The parameters outside the student, such as projections to the teacher's width, are copies on every process.
    """

    def __init__(self, layout: Layout, mesh: DeviceMesh):
        super().__init__(data_parallel_size=layout.data_parallel, tensor_parallel_size=layout.tp)
        self.mesh, self.segment = mesh, find_segment(mesh)

    def setup_environment(self) -> None:
        """Creates the process group; the mesh exists already."""
        Strategy.setup_environment(self)
        self._setup_distributed()

    def setup(self, trainer: Trainer) -> None:
        """Makes the parts of the module that aren't on the mesh equal copies, and sets up the optimizers."""
        if self.accelerator is None:
            raise RuntimeError("the strategy has no accelerator yet: Lightning's trainer sets it")
        self.accelerator.setup(trainer)
        for child in self._module.children():
            # Weights on the mesh are already on their device, which is the CPU for offloaded weights.
            if not any(isinstance(parameter, DTensor) for parameter in child.parameters()):
                child.to(self.root_device)
                broadcast_parameters(child, self.mesh)
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def average_plain_gradients(self) -> None:
        """Averages the gradients of parameters outside the student; called once per step, before clipping."""
        average_gradients(self._module.parameters(), self.mesh)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Disables gradient reduction during accumulation, which Lightning supports for DDP only."""
        modules = [module for module in self._module.modules() if isinstance(module, FSDPModule)]
        for module in modules:
            module.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            for module in modules:
                module.set_requires_gradient_sync(True, recurse=False)


class PipelineStrategy(MeshStrategy):
    """A student in pipeline stages; the pipeline schedule runs the backward pass before it returns the loss."""

    def backward(self, closure_loss: Tensor, optimizer: object, *args: object, **kwargs: object) -> Tensor:
        """Calls the hooks that follow a backward pass and returns the loss, whose gradients are computed already."""
        return self.precision_plugin.post_backward(closure_loss, cast(LightningModule, self._module))


def build_strategy(layout: Layout, machine: MachineConfig, mesh: DeviceMesh | None) -> Strategy:
    """Returns the strategy that trains a student with this layout.

    Raises:
        InputError: The machine's DeepSpeed settings are invalid.
        RuntimeError: The machine has no device of the requested kind.
        ValueError: The layout is sharded and there is no mesh.
    """
    if machine.deepspeed:
        return ZeroStrategy(build_settings(machine.deepspeed))
    if layout.processes == 1:
        return SingleProcessStrategy(device=choose_device(machine.accelerator))
    if layout.shards_gradients or layout.cp > 1:
        if mesh is None:
            raise ValueError(f"layout {layout}: a sharded student needs the mesh that it lies on")
        if not layout.sharded and layout.cp > 1:
            return SegmentStrategy(mesh, compress=machine.gradient_compression, bucket_mb=machine.bucket_mb)
        return (PipelineStrategy if layout.pp > 1 else MeshStrategy)(layout, mesh)
    return ReplicatedStrategy(compress=machine.gradient_compression, bucket_mb=machine.bucket_mb)


def choose_device(accelerator: str) -> torch.device:
    """Returns the device of a run with one process.

    Raises:
        RuntimeError: The machine has no device of this kind.
    """
    if accelerator in ("gpu", "cuda") or (accelerator == "auto" and torch.cuda.is_available()):
        return torch.device("cuda", torch.cuda.current_device())
    if accelerator == "mps" or (accelerator == "auto" and torch.backends.mps.is_available()):
        return torch.device("mps")
    return torch.device("cpu")
