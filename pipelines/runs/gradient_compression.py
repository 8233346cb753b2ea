"""Compression of the gradients that replicas of a student exchange: none, 16 bits, or low-rank matrices."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

POWER_RANK = 4
POWER_START = 10  # the first steps send uncompressed gradients; PowerSGD's error feedback starts after them


def register_compression(model: Any, compress: str) -> None:
    """Registers the communication hook for `compress` on a DDP model.

    Source: PowerSGD is Vogels et al. 2019 (arXiv 1905.13727), with error feedback and warm start.
    """
    assert isinstance(model, DistributedDataParallel)
    if compress == "powersgd":
        state = PowerSGDState(None, matrix_approximation_rank=POWER_RANK, start_powerSGD_iter=POWER_START)
        model.register_comm_hook(state, powerSGD_hook)
    elif compress != "none":
        model.register_comm_hook({"fp16": torch.float16, "bf16": torch.bfloat16}[compress], halved)


def halved(kind: torch.dtype, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket of gradients in the 16-bit type `kind`, dividing before the sum.

    PyTorch's own bf16 hook is only available on CUDA.
    """
    whole = bucket.buffer()
    sent = whole.to(kind).div_(dist.get_world_size())
    future = dist.all_reduce(sent, async_op=True).get_future()

    def back(done: torch.futures.Future[Any]) -> torch.Tensor:
        return whole.copy_(done.value()[0])

    return future.then(back)
