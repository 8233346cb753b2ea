"""Lightning strategies: one process, replicas (DDP, ZeRO-1), and students on a mesh (FSDP2, TP, 2D, HSDP, pipeline).

They save and restore through `pipelines.runs.training_checkpoint`: each process its own shards, in any layout.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from distill.parallel.layout import Layout
from distill.parallel.mesh import data_rank
from pipelines.runs.deepspeed import OnDeepSpeed, deepspeed_settings
from pipelines.runs.gradient_compression import register_compression
from pipelines.runs.training_checkpoint import load_training, save_training
from pipelines.settings.distill_config import MachineConfig


class Portable(Strategy):
    """Replaces Lightning's checkpoints by those of `pipelines.runs.training_checkpoint`, written asynchronously.

    `saving` is done when the newest checkpoint is on disk.
    """

    saving: Future[Any] | None = None
    savers: Any = None  # separate group, so that a checkpoint's collectives don't interleave with those of training

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        assert self.lightning_module is not None
        if dist.is_initialized() and self.savers is None:
            self.savers = dist.new_group(backend="gloo")
        self.saving = save_training(
            Path(filepath), self.lightning_module, self.optimizers, checkpoint, group=self.savers
        )

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        assert self.lightning_module is not None
        return load_training(Path(checkpoint_path), self.lightning_module, self.optimizers)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Does nothing; `load_checkpoint` loads the weights."""

    def whole(self, module: nn.Module) -> AbstractContextManager[None]:
        """Context in which all weights can be read or set; here each process only needs its own shards."""
        return nullcontext()

    def release(self, module: nn.Module) -> None:
        """Called after training; does nothing here."""


class OneProcess(Portable, SingleDeviceStrategy):
    """Strategy for a single device."""


class ReplicatedStrategy(Portable, DDPStrategy):
    """A replica on every process; gradients are averaged after the last batch of a step.

    Args:
        compress: Format in which gradients are sent: none, fp16, bf16 or powersgd.
        bucket_mb: Size in MiB of the gradient buckets that are sent together.
    """

    def __init__(self, *, compress: str, bucket_mb: int):
        super().__init__(bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)
        self.compress = compress

    def _register_ddp_hooks(self) -> None:
        """Registers the compression hook, which Lightning silently skips on devices other than CUDA."""
        register_compression(self.model, self.compress)


class Meshed(Portable, ModelParallelStrategy):
    """A student whose parameters are already on the mesh; its parallel modules reduce the gradients."""

    def __init__(self, layout: Layout, mesh: DeviceMesh):
        super().__init__(data_parallel_size=layout.data_parallel, tensor_parallel_size=layout.tp)
        self.mesh = mesh

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        rank, ranks = data_rank(self.mesh)
        return {"num_replicas": ranks, "rank": rank}

    def setup_environment(self) -> None:
        Strategy.setup_environment(self)
        self._setup_distributed()

    def setup(self, trainer: Any) -> None:
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        for child in self.model.children():
            # Weights on the mesh are already on their device, which is the CPU for offloaded weights.
            if not any(isinstance(parameter, DTensor) for parameter in child.parameters()):
                child.to(self.root_device)
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Disables gradient reduction during accumulation, which Lightning supports for DDP only."""
        assert self.model is not None
        modules = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        for module in modules:
            module.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            for module in modules:
                module.set_requires_gradient_sync(True, recurse=False)


class PipelineStrategy(Meshed):
    """A student in pipeline stages; the pipeline schedule runs the backward pass before it returns the loss."""

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        return closure_loss


def strategy_of(layout: Layout, machine: MachineConfig, mesh: DeviceMesh | None) -> Strategy:
    """Returns the strategy that trains a student with this layout."""
    if machine.strategy:
        return OnDeepSpeed(deepspeed_settings(machine.strategy))
    if layout.processes == 1:
        return OneProcess(device=device_of(machine.accelerator))
    if layout.sharded or layout.zero == 2:
        assert mesh is not None
        return (PipelineStrategy if layout.pp > 1 else Meshed)(layout, mesh)
    return ReplicatedStrategy(compress=machine.compress, bucket_mb=machine.bucket_mb)


def device_of(accelerator: str) -> torch.device:
    """Returns the device of a run with one process.

    Raises:
        RuntimeError: The machine has no device of this kind.
    """
    if accelerator in ("gpu", "cuda") or (accelerator == "auto" and torch.cuda.is_available()):
        return torch.device("cuda", torch.cuda.current_device())
    if accelerator == "mps" or (accelerator == "auto" and torch.backends.mps.is_available()):
        return torch.device("mps")
    return torch.device("cpu")
