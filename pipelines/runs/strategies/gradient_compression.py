"""Compression of the gradients that replicas of a student exchange: none, 16 bits, or low-rank matrices."""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

POWER_RANK = 4
POWER_START = 10  # the first steps send uncompressed gradients; PowerSGD's error feedback starts after them


def register_compression(model: DistributedDataParallel, compress: str) -> None:
    """Registers the communication hook for `compress`: none, fp16, bf16 or powersgd.

    Source: PowerSGD is Vogels et al. 2019 (arXiv 1905.13727), with error feedback and warm start.
    """
    if compress == "powersgd":
        state = PowerSGDState(None, matrix_approximation_rank=POWER_RANK, start_powerSGD_iter=POWER_START)
        model.register_comm_hook(state, powerSGD_hook)
    elif compress != "none":
        model.register_comm_hook({"fp16": torch.float16, "bf16": torch.bfloat16}[compress], average_in_16_bits)


def average_in_16_bits(dtype: torch.dtype, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket of gradients in the 16-bit type `dtype`, dividing before the sum.

    PyTorch's own bf16 hook is only available on CUDA.
    """
    gradients = bucket.buffer()
    sent = gradients.to(dtype).div_(dist.get_world_size())
    future = dist.all_reduce(sent, async_op=True).get_future()

    def restore_precision(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        return gradients.copy_(done.value()[0])

    averaged: torch.futures.Future[torch.Tensor] = future.then(restore_precision)
    return averaged
