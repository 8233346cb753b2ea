"""Parameters that a mesh doesn't shard, such as those outside the student: equal copies on all processes.

No parallel module keeps the copies equal, so that a training has to broadcast them at its start and to average their
gradients in each step.
"""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

_DATA_AXES = ("dp", "fsdp", "cp")  # whose processes have different rows, or different positions of the same rows


@torch.no_grad()
def broadcast_parameters(module: nn.Module, mesh: DeviceMesh) -> None:
    """Gives the plain parameters of a module the values of the first process with the same pipeline stage.

    Every process of the mesh calls it.
    """
    parameters = [each for each in module.parameters() if not isinstance(each, DTensor)]
    for axis in (*_DATA_AXES, "tp"):
        for parameter in parameters if mesh[axis].size() > 1 else ():
            dist.broadcast(parameter, group=mesh.get_group(axis), group_src=0)


@torch.no_grad()
def average_gradients(parameters: Iterable[Tensor], mesh: DeviceMesh) -> None:
    """Averages the gradients of plain parameters over all processes with different rows or positions.

    With the `shares` of batches the average is the gradient of the whole batch. Processes of a tp group have the same
    rows, so that their gradients are equal already. Every process of the mesh calls it once per step, after
    accumulation and with gradients of the same parameters.
    """
    plain = (each.grad for each in parameters if not isinstance(each, DTensor))
    gradients = [each for each in plain if each is not None]
    axes = [axis for axis in _DATA_AXES if mesh[axis].size() > 1]
    for axis in axes:
        reductions = [dist.all_reduce(each, group=mesh.get_group(axis), async_op=True) for each in gradients]
        for work in reductions:
            work.wait()
    if gradients and axes:
        torch._foreach_div_(gradients, float(math.prod(mesh[axis].size() for axis in axes)))
