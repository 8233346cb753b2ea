"""Gradient clipping by one norm over DTensors on different meshes and plain tensors."""

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.nn.utils import get_total_norm

_MeshPlacement = tuple[DeviceMesh, tuple[Placement, ...]] | None  # None: a plain tensor


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scales all gradients in place by min(1, max_norm / (norm + 1e-6)); returns the norm before, float32 scalar.

    The norm is that of the full gradient: shards are summed over the processes and replicas count once, so that the
    norm is equal on every process. Plain tensors are assumed to be replicated. All processes of the gradients' meshes
    call it; there is one reduction for each kind of placement, not for each tensor.

    Raises:
        ValueError: A gradient isn't reduced yet.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.tensor(0.0)
    groups: dict[_MeshPlacement, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        groups[_find_placement(gradient)].append(gradient.to_local() if isinstance(gradient, DTensor) else gradient)
    device = next(iter(groups.values()))[0].device
    norm = (
        torch.stack([_square_norm(local, placement).to(device) for placement, local in groups.items()])
        .sum()
        .sqrt()
        .float()
    )
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for local in groups.values():
        torch._foreach_mul_(local, scale.to(local[0].device))
    return norm


def _find_placement(gradient: Tensor) -> _MeshPlacement:
    return (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else None


def _square_norm(local: list[Tensor], placement: _MeshPlacement) -> Tensor:
    """Returns the squared norm of gradients with the same placement.

    It is computed in float64, so that the order of summation does not affect the result.
    """
    total = get_total_norm(local).double().square()
    if placement is None:
        return total
    mesh, placements = placement
    if any(each.is_partial() for each in placements):
        raise ValueError(f"gradient: expected reduced placements, found {placements}: its norm is unknown")
    total = total.to(mesh.device_type)
    for axis, each in enumerate(placements):
        if not each.is_replicate():
            dist.all_reduce(total, group=mesh.get_group(axis))
    return total
