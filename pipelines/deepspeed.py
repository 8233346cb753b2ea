"""DeepSpeed's ZeRO as a strategy: `deepspeed_stage_1` to `3`, with `_offload`, or a file of DeepSpeed's settings.

Checkpoints while training are DeepSpeed's own: a run goes on with as many processes as it was killed with. What a run
leaves is a stock checkpoint like any other's.
"""

import importlib.util
import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.strategies.parallel import ParallelStrategy
from torch import nn

from distill.errors import InputError

STAGE = re.compile(r"deepspeed_stage_([123])(_offload)?")
# What our own settings decide, by the key of DeepSpeed's file that would decide it a second time.
OURS = {
    "optimizer": "--learning-rate and --train.*",
    "scheduler": "--train.schedule and --train.warmup",
    "gradient_accumulation_steps": "--train.accumulate",
    "gradient_clipping": "--train.max_grad_norm",
    "train_batch_size": "--batch-size",
    "bf16": "--precision bf16-mixed",
    "fp16": "--precision 16-mixed",
}
UNTESTED = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}  # PyTorch's own AdamW


def deepspeed_settings(strategy: str) -> dict[str, Any]:
    """DeepSpeed's settings for what `--strategy` says.

    Raises:
        InputError: DeepSpeed isn't installed; neither a stage nor a file of settings; settings that ours decide.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise InputError(
            f"machine.strategy {strategy!r}: DeepSpeed isn't installed: pip install 'stillroom[deepspeed]', or use "
            "--student.layout zero1, zero2 or fsdp=N, which need nothing"
        )
    found = STAGE.fullmatch(strategy)
    if found is None:
        return UNTESTED | read_settings(strategy)
    zero: dict[str, Any] = {"stage": int(found[1])}
    if found[2]:
        place = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
        zero |= {"offload_optimizer": place} | ({"offload_param": place} if zero["stage"] == 3 else {})
    return UNTESTED | {"zero_optimization": zero}


def read_settings(file: str) -> dict[str, Any]:
    try:
        settings = json.loads(Path(file).read_text())
    except (OSError, ValueError) as error:
        raise InputError(
            f"machine.strategy {file!r}: expected deepspeed_stage_1, 2 or 3, each with or without _offload, or a JSON "
            f"file of DeepSpeed's settings; found no such file: {error}"
        ) from error
    if not isinstance(settings, dict) or "zero_optimization" not in settings:
        raise InputError(f"machine.strategy {file!r}: expected an object with zero_optimization in it")
    for key in settings.keys() & OURS.keys():
        raise InputError(f"machine.strategy {file!r}: {key} is decided by {OURS[key]}; take it out of the file")
    return settings


class OnDeepSpeed(DeepSpeedStrategy):
    """ZeRO 1 to 3 by DeepSpeed, also on CPU, which Lightning refuses; it accumulates and clips by itself."""

    clips_gradients = True

    def __init__(self, settings: dict[str, Any]):
        if not torch.cuda.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        super().__init__(config=settings, exclude_frozen_parameters=False)

    @property
    def root_device(self) -> torch.device:
        # DeepSpeed compares the index, which a plain cpu device hasn't.
        return super().root_device if torch.cuda.is_available() else torch.device("cpu", 0)

    def setup_environment(self) -> None:
        ParallelStrategy.setup_environment(self)
        if torch.cuda.is_available():
            self.setup_distributed()
        else:
            self.set_world_ranks()
            self._init_deepspeed_distributed()

    def _get_process_group_backend(self) -> str:
        return "nccl" if torch.cuda.is_available() else "gloo"

    @property
    def saving(self) -> Future[Any]:
        """DeepSpeed writes before it returns."""
        done: Future[Any] = Future()
        done.set_result(None)
        return done

    @contextmanager
    def whole(self, module: nn.Module) -> Iterator[None]:
        """The weights of all processes, gathered while the context lasts."""
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(module.parameters()), enabled=self.zero_stage_3):
            yield

    def release(self, module: nn.Module) -> None:
        """Leaves plain weights: after the training DeepSpeed has no more to say of them."""
        with self.whole(module):
            kept = {name: parameter.data.clone() for name, parameter in module.named_parameters()}
        for name, parameter in module.named_parameters():
            parameter.data = kept[name]
