"""Device meshes of layouts, and the data-parallel position of a process in a mesh."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from distill.parallel.layout import AXES, Layout


def build_mesh(layout: Layout, device_type: str, ranks: Sequence[int] | None = None) -> DeviceMesh:
    """Returns the mesh of `layout` over some processes of the world, with the dimensions pp, dp, fsdp and tp.

    Every process of the world must call it, including those outside `ranks`: creating process groups is collective.

    Args:
        layout: Sizes of the dimensions; their product is the number of `ranks`.
        device_type: "cpu" or "cuda".
        ranks: Global ranks, with the ranks of a tensor-parallel group adjacent; by default the whole world.

    Raises:
        ValueError: The number of ranks isn't the layout's number of processes.
    """
    members = list(range(dist.get_world_size())) if ranks is None else list(ranks)
    if len(members) != layout.processes:
        raise ValueError(f"layout {layout}: expected {layout.processes} ranks, found {len(members)}: {members}")
    sizes = [getattr(layout, axis) for axis in AXES]
    return DeviceMesh(device_type, torch.tensor(members).view(sizes), mesh_dim_names=AXES)


def find_data_rank(mesh: DeviceMesh) -> tuple[int, int]:
    """Returns the index of this process's share of a batch and the number of shares (dp x fsdp)."""
    fsdp = mesh["fsdp"].size()
    return mesh.get_local_rank("dp") * fsdp + mesh.get_local_rank("fsdp"), mesh["dp"].size() * fsdp


def select_data_mesh(mesh: DeviceMesh, layout: Layout) -> DeviceMesh:
    """Returns the mesh that FSDP shards weights over: [shards], or [replicas, shards] for hybrid sharding."""
    if layout.zero:
        return mesh["dp"]
    return mesh["dp", "fsdp"] if layout.dp > 1 else mesh["fsdp"]
