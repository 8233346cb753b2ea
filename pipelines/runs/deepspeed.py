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
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.strategies.parallel import ParallelStrategy
from torch import nn

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
    found = STAGE.fullmatch(strategy)
    if found is None:
        return PYTORCH_ADAMW | read_deepspeed_json(strategy)
    stage = int(found[1])
    zero: DeepSpeedSettings = {"stage": stage}
    if found[2]:
        target = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
        zero |= {"offload_optimizer": target} | ({"offload_param": target} if stage == 3 else {})
    return PYTORCH_ADAMW | {"zero_optimization": zero}


class ZeroStrategy(DeepSpeedStrategy):
    """DeepSpeed strategy for ZeRO 1 to 3, also on CPUs, which Lightning doesn't support.

    DeepSpeed accumulates and clips gradients itself.
    """

    clips_gradients = True

    def __init__(self, settings: DeepSpeedSettings):
        if not torch.cuda.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        super().__init__(config=settings, exclude_frozen_parameters=False)

    @property
    def root_device(self) -> torch.device:
        """The device of this process, with an index: DeepSpeed compares it, and a plain cpu device has none."""
        return super().root_device if torch.cuda.is_available() else torch.device("cpu", 0)

    def setup_environment(self) -> None:
        """Creates the process group, with gloo where there is no GPU."""
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
        """Gathers the weights of all processes for the duration of the context."""
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(module.parameters()), enabled=self.zero_stage_3):
            yield

    def restore_weights(self, module: nn.Module) -> None:
        """Replaces DeepSpeed's partitioned weights by plain ones after training."""
        with self.gather_weights(module):
            weights = {name: parameter.data.clone() for name, parameter in module.named_parameters()}
        for name, parameter in module.named_parameters():
            parameter.data = weights[name]
