"""Lays a model out on a mesh: tensor parallel first, then FSDP2 over the data-parallel processes."""

from collections import defaultdict
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import PreTrainedModel

from distill.errors import InputError
from distill.parallel.layout import Layout, fitting_model
from distill.parallel.mesh import data_mesh
from distill.parallel.tensor_plan import layer_names, tensor_plan


def apply_layout(
    model: PreTrainedModel,
    layout: Layout,
    mesh: DeviceMesh,
    *,
    exact: bool = False,
    policy: MixedPrecisionPolicy | None = None,
    offload: bool = False,
    prefetch: int = 1,
) -> PreTrainedModel:
    """Cuts the model's weights, in place, as the layout says; each process of the mesh calls it.

    Where nothing is cut (`replicated`, `zero1`) the model comes back as it is, for DDP. Each process must hold the same
    weights, or all of them on the meta device (see `load_sharded`).

    Args:
        model: Frozen or to be trained. A frozen one is cut up again after every forward.
        layout: Without pp; a stage of a pipeline is no whole model.
        mesh: From `mesh_of(layout, ...)`.
        exact: Cut products by columns only: the same bits as unsharded on most CPU sizes (see `tensor_plan`).
        policy: Types for FSDP's weights and reductions; its `output_dtype` holds for the whole model's output only.
        offload: FSDP keeps its parts, their gradients and the optimizer's state in the CPU's memory.
        prefetch: Layers whose weights are gathered ahead of the one at work.

    Raises:
        InputError: Heads or widths that can't be shared out evenly, a family without a plan, no list of layers.
    """
    if layout.pp > 1:
        raise ValueError(f"layout {layout}: a pipeline's stages are laid out by distill.parallel.pipeline")
    if layout.tp > 1:
        cut_products(model, layout, mesh["tp"], exact=exact)
    if layout.fsdp > 1 or layout.zero == 2 or (layout.tp > 1 and layout.dp > 1):
        policy = policy or MixedPrecisionPolicy()
        offloading = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
        groups = cut_weights(model, data_mesh(mesh, layout), policy, offloading, keep=layout.zero == 2)
        gather_ahead(model, groups, prefetch)
    return model


def cut_products(model: PreTrainedModel, layout: Layout, mesh: DeviceMesh, *, exact: bool) -> None:
    """Tensor parallelism over the 1-D `mesh`; weights that several modules share stay shared."""
    fitting_model(layout, model.config, "layout")
    plan = tensor_plan(model, exact=exact)
    for name, style in plan.items():
        check_cut(model, name, style, mesh.size())
    shared = shared_parameters(model)
    for name, style in plan.items():
        parallelize_module(model.get_submodule(name), mesh, style, src_data_rank=None)
    for places in shared:
        found = [getattr(module, name) for module, name in places]
        cut = next((each for each in found if isinstance(each, DTensor)), found[0])
        for module, name in places:
            setattr(module, name, cut)


def check_cut(model: PreTrainedModel, name: str, style: ParallelStyle, parts: int) -> None:
    """Raises InputError where a module is none that torch can cut, or neighbours would get slices of unlike width."""
    if not isinstance(style, ColwiseParallel | RowwiseParallel):
        return
    module = dict(model.named_modules()).get(name)
    if not isinstance(module, nn.Linear | nn.Embedding):
        found = "a bare parameter" if module is None else type(module).__name__
        raise InputError(f"tp={parts}: {name} is {found}; only nn.Linear and nn.Embedding can be cut; use fsdp=N")
    if isinstance(module, nn.Linear):
        sizes = {
            "inputs": (module.in_features, style.input_layouts),
            "outputs": (module.out_features, style.output_layouts),
        }
        for what, (size, (placement,)) in sizes.items():
            if isinstance(placement, Shard) and size % parts:
                raise InputError(f"tp={parts}: {name} has {size} {what}, which can't be shared out evenly")


def shared_parameters(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """The places (module, name) of each parameter that has several."""
    places: dict[Tensor, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places[parameter].append((module, name))
    return [found for found in places.values() if len(found) > 1]


def cut_weights(
    model: PreTrainedModel, mesh: DeviceMesh, policy: MixedPrecisionPolicy, offloading: OffloadPolicy, *, keep: bool
) -> list[FSDPModule]:
    """FSDP2 over `mesh`, a group a layer; returns the groups within the model in the order they run.

    `keep` leaves weights whole between forward and backward (ZeRO-2).
    """
    # A layer that gave out output_dtype would hand the next one, or the head, another type than its weights have.
    inner = replace(policy, output_dtype=None)
    groups = [model.get_submodule(name) for name in layer_names(model)]
    embedding = model.get_input_embeddings()
    if own_group(model, embedding, groups[0]):
        groups.insert(0, embedding)
    for group in groups:
        fully_shard(group, mesh=mesh, reshard_after_forward=not keep, mp_policy=inner, offload_policy=offloading)
    trained = any(parameter.requires_grad for parameter in model.parameters())
    # Training asks for the head first thing in the backward; nothing would ever free a frozen model's.
    free = not (keep or trained)
    fully_shard(model, mesh=mesh, reshard_after_forward=free, mp_policy=policy, offload_policy=offloading)
    return [group for group in groups if isinstance(group, FSDPModule)]


def own_group(model: PreTrainedModel, embedding: nn.Module, layer: nn.Module) -> bool:
    """Whether the input embedding is larger than a layer, and no other module uses its weight."""
    if not isinstance(embedding, nn.Embedding):
        return False
    uses = sum(each is embedding.weight for _, each in model.named_parameters(remove_duplicate=False))
    return uses == 1 and embedding.weight.numel() > sum(each.numel() for each in layer.parameters())


def gather_ahead(model: nn.Module, groups: list[FSDPModule], depth: int) -> None:
    """Each group asks for the weights of the `depth` groups that run after it, forwards and backwards."""
    order = [model, *groups] if isinstance(model, FSDPModule) else groups
    for i, group in enumerate(order):
        group.set_modules_to_forward_prefetch(order[i + 1 : i + 1 + depth])
    order = [*order[:1], *reversed(groups)]
    for i, group in enumerate(order):
        group.set_modules_to_backward_prefetch(order[i + 1 : i + 1 + depth])


def reshard(model: nn.Module) -> None:
    """Frees the weights that FSDP holds whole, as the head's and, with zero2, all after a forward without backward."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole(tensor: Tensor) -> Tensor:
    """The whole of a weight or gradient, from its parts; a plain tensor as it is. Its processes call it together."""
    if not isinstance(tensor, DTensor):
        return tensor
    placements = list(tensor.placements)
    for axis in range(len(placements)):  # FSDP cut last and stands first: in this order each step is one gather
        placements[axis] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


@torch.no_grad()
def gather(model: nn.Module, *, keep: bool = True) -> dict[str, Tensor]:
    """The whole state dict in the CPU's memory, one weight at a time; each process of the mesh calls it.

    Args:
        keep: Whether this process wants it; one that doesn't takes part and gets an empty dict.
    """
    reshard(model)
    found = {}
    for name, tensor in model.state_dict().items():
        value = whole(tensor)
        if keep:
            found[name] = value.cpu()
    return found
