"""DeepSpeed's ZeRO as a Lightning strategy: `deepspeed_stage_1` to `3`, with `_offload`, or a settings file.

Training checkpoints are in DeepSpeed's own format, so a run must resume with the same number of processes. The final
checkpoint of a run is a stock checkpoint.
"""

import os
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeAlias

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.strategies.parallel import ParallelStrategy
from torch import Tensor, nn
from torch.nn import functional

from pipelines.runs.strategies.extension_locks import clear_orphaned_locks
from pipelines.runs.training_checkpoint import completed_future
from pipelines.settings.deepspeed_json import STAGE, check_strategy, read_deepspeed_json

DeepSpeedSettings: TypeAlias = dict[str, object]  # DeepSpeed's JSON format
PYTORCH_ADAMW: DeepSpeedSettings = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}


def build_settings(strategy: str) -> DeepSpeedSettings:
    """Returns DeepSpeed's settings for the value of `--strategy`; they allow PyTorch's own AdamW.

    Raises:
        InputError: See `check_strategy`.
    """
    check_strategy(strategy)
    match = STAGE.fullmatch(strategy)
    if match is None:
        return PYTORCH_ADAMW | read_deepspeed_json(strategy)
    stage = int(match[1])
    zero: DeepSpeedSettings = {"stage": stage}
    if match[2]:
        target = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
        zero |= {"offload_optimizer": target} | ({"offload_param": target} if stage == 3 else {})
    return PYTORCH_ADAMW | {"zero_optimization": zero}


class ZeroStrategy(DeepSpeedStrategy):
    """DeepSpeed strategy for ZeRO 1 to 3, also on CPUs, which Lightning doesn't support.

    DeepSpeed accumulates and clips gradients itself. In mixed precision the module's parameters have 16 bits, and the
    float32 weights that are trained are its optimizer's.
    """

    clips_gradients = True

    def __init__(self, settings: DeepSpeedSettings):
        if not torch.cuda.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        super().__init__(config=settings, exclude_frozen_parameters=False)
        self._frozen: dict[Tensor, Tensor] = {}  # float32 weights that DeepSpeed rounds and has no copy of

    def setup(self, trainer: Trainer) -> None:
        """Sets up DeepSpeed's engine, in mixed precision with the float32 weights that it has rounded to 16 bits."""
        module = self.lightning_module
        if self.precision_plugin.precision == "32-true" or module is None:
            super().setup(trainer)
            return
        exact: dict[Tensor, Tensor] = {each: each.detach().clone() for each in module.parameters()}
        super().setup(trainer)
        for parameter in module.parameters():
            if parameter.requires_grad:
                _set_float32(parameter, exact.pop(parameter))
        self._frozen = exact

    @property
    def root_device(self) -> torch.device:
        """The device of this process, with an index: DeepSpeed compares it, and a plain cpu device has none."""
        return super().root_device if torch.cuda.is_available() else torch.device("cpu", 0)

    def setup_environment(self) -> None:
        """Creates the process group, with gloo where there is no GPU; DeepSpeed compiles operators for it."""
        clear_orphaned_locks(deletes=self.local_rank == 0)
        ParallelStrategy.setup_environment(self)
        if torch.cuda.is_available():
            self.setup_distributed()
        else:
            self.set_world_ranks()
            self._init_deepspeed_distributed()

    def _get_process_group_backend(self) -> str:
        return "nccl" if torch.cuda.is_available() else "gloo"

    @property
    def saving(self) -> Future[None]:
        """A completed future, because DeepSpeed's checkpoints are written synchronously."""
        return completed_future()

    @contextmanager
    def gather_weights(self, module: nn.Module) -> Iterator[None]:
        """Gathers the weights of all processes for the duration of the context, in float32."""
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(module.parameters()), enabled=self.zero_stage_3):
            rounded = {parameter: parameter.data for parameter in module.parameters()}
            for parameter in rounded:
                if parameter.dtype != torch.float32:
                    parameter.data = self._find_float32(parameter)
            try:
                yield
            finally:
                for parameter, data in rounded.items():
                    parameter.data = data

    def _find_float32(self, parameter: nn.Parameter) -> Tensor:
        """Returns the float32 weight of a 16-bit parameter; every process calls it, because it is gathered."""
        from deepspeed.utils import safe_get_full_fp32_param

        frozen = self._frozen.get(parameter)
        return safe_get_full_fp32_param(parameter) if frozen is None else frozen.to(parameter.device)

    def restore_weights(self, module: nn.Module) -> None:
        """Replaces DeepSpeed's partitioned weights by plain ones in float32 after training."""
        with self.gather_weights(module):
            weights = {name: parameter.data.clone() for name, parameter in module.named_parameters()}
        for name, parameter in module.named_parameters():
            parameter.data = weights[name]


def _set_float32(parameter: nn.Parameter, weight: Tensor) -> None:
    """Sets the float32 weight of a 16-bit parameter, of which each process has a part."""
    from deepspeed.utils import safe_get_local_fp32_param, safe_set_full_fp32_param, safe_set_local_fp32_param

    if not hasattr(parameter, "ds_id"):
        safe_set_full_fp32_param(parameter, weight.to(parameter.device))
        return
    # Stage 3 pads its parts to equal sizes, and safe_set_full_fp32_param doesn't.
    part = safe_get_local_fp32_param(parameter).numel()
    padded = functional.pad(weight.flatten(), (0, part * dist.get_world_size() - weight.numel()))
    safe_set_local_fp32_param(parameter, padded.view(-1, part)[dist.get_rank()].to(parameter.device))
