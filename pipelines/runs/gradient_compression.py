"""How gradients travel between copies of a student: whole, in 16 bits, or as matrices of low rank."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

POWER_RANK = 4
POWER_START = 10  # whole gradients in the first steps: PowerSGD's memory of what it left out begins with them


def register_compression(model: Any, compress: str) -> None:
    """Makes DDP send gradients as `compress` says.

    Source: PowerSGD is Vogels et al. 2019 (arXiv 1905.13727), with error feedback and warm start.
    """
    assert isinstance(model, DistributedDataParallel)
    if compress == "powersgd":
        state = PowerSGDState(None, matrix_approximation_rank=POWER_RANK, start_powerSGD_iter=POWER_START)
        model.register_comm_hook(state, powerSGD_hook)
    elif compress != "none":
        model.register_comm_hook({"fp16": torch.float16, "bf16": torch.bfloat16}[compress], halved)


def halved(kind: torch.dtype, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Sums in `kind`, divided before: half the bytes. PyTorch's own hook for bf16 is refused outside CUDA."""
    whole = bucket.buffer()
    sent = whole.to(kind).div_(dist.get_world_size())
    future = dist.all_reduce(sent, async_op=True).get_future()

    def back(done: torch.futures.Future[Any]) -> torch.Tensor:
        return whole.copy_(done.value()[0])

    return future.then(back)
