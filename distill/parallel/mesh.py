"""Device meshes of layouts, and which rows and positions of a batch a process has in a mesh."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from distill.parallel.layout import AXES, Layout


def build_mesh(layout: Layout, device_type: str, ranks: Sequence[int] | None = None) -> DeviceMesh:
    """Returns the mesh of `layout` over some processes of the world, with the dimensions pp, dp, fsdp, cp and tp.

    Every process of the world must call it, including those outside `ranks`: creating process groups is collective.

    Args:
        layout: Sizes of the dimensions; their product is the number of `ranks`.
        device_type: "cpu" or "cuda".
        ranks: Global ranks, with the ranks of a tp or cp group adjacent; by default the whole world.

    Raises:
        ValueError: The number of ranks isn't the layout's number of processes.
    """
    members = list(range(dist.get_world_size())) if ranks is None else list(ranks)
    if len(members) != layout.processes:
        raise ValueError(f"layout {layout}: expected {layout.processes} ranks, found {len(members)}: {members}")
    sizes = [getattr(layout, axis) for axis in AXES]
    return DeviceMesh(device_type, torch.tensor(members).view(sizes), mesh_dim_names=AXES)


def find_data_rank(mesh: DeviceMesh) -> tuple[int, int]:
    """Returns the index of this process's share of a batch's rows and the number of shares (dp x fsdp)."""
    fsdp = mesh["fsdp"].size()
    return mesh.get_local_rank("dp") * fsdp + mesh.get_local_rank("fsdp"), mesh["dp"].size() * fsdp


def find_segment(mesh: DeviceMesh) -> tuple[int, int]:
    """Returns the index of this process's segment of each row's positions and the number of segments (cp)."""
    return mesh.get_local_rank("cp"), mesh["cp"].size()


def select_data_mesh(mesh: DeviceMesh, layout: Layout) -> DeviceMesh:
    """Returns the mesh that FSDP shards weights over: [shards], or [replicas, shards] for hybrid sharding.

    Processes with segments of the same rows have different gradients, like those with different rows.
    """
    if layout.zero:
        return mesh["dp"]
    shards = "fsdp"
    if layout.cp > 1:
        flat = mesh["fsdp", "cp"]._flatten(shards := "fsdp_cp")
        if layout.dp == 1:
            return flat
    return mesh["dp", shards] if layout.dp > 1 else mesh[shards]
