"""Sharding of a model over a mesh: tensor parallelism first, then FSDP2 over the data-parallel processes."""

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
    """Shards the model's weights in place according to the layout; each process of the mesh calls it.

    A layout that shards no weights (`replicated`, `zero1`) leaves the model unchanged, for DDP. Each process must have
    the same weights, or all weights on the meta device (see `load_sharded`).

    Args:
        model: Frozen or to be trained. FSDP reshards the weights of a frozen model after every forward pass.
        layout: Layout without pp; a pipeline stage is not a complete model.
        mesh: From `mesh_of(layout, ...)`.
        exact: Shard products by columns only; bit-identical to the unsharded model for most sizes on CPU (see
            `tensor_plan`).
        policy: Dtypes of FSDP's weights and reductions; its `output_dtype` applies to the output of the model only.
        offload: FSDP keeps its shards, their gradients and the optimizer state in CPU memory.
        prefetch: Number of layers whose weights are gathered ahead of the current layer.

    Raises:
        InputError: Heads or widths can't be divided evenly, the family has no plan, or the model has no list of layers.
    """
    if layout.pp > 1:
        raise ValueError(f"layout {layout}: a pipeline's stages are laid out by distill.parallel.pipeline")
    if layout.tp > 1:
        apply_tensor_parallel(model, layout, mesh["tp"], exact=exact)
    if layout.fsdp > 1 or layout.zero == 2 or (layout.tp > 1 and layout.dp > 1):
        policy = policy or MixedPrecisionPolicy()
        offloading = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
        groups = apply_fsdp(model, data_mesh(mesh, layout), policy, offloading, keep=layout.zero == 2)
        gather_ahead(model, groups, prefetch)
    return model


def apply_tensor_parallel(model: PreTrainedModel, layout: Layout, mesh: DeviceMesh, *, exact: bool) -> None:
    """Applies tensor parallelism over the 1-D `mesh`; weights shared by several modules stay shared."""
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
    """Checks that torch can shard a module into `parts` equal slices.

    Raises:
        InputError: The module has an unsupported type, or its width is not divisible by `parts`.
    """
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
    """Returns the places (module, name) of each parameter that is registered in more than one."""
    places: dict[Tensor, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places[parameter].append((module, name))
    return [found for found in places.values() if len(found) > 1]


def apply_fsdp(
    model: PreTrainedModel, mesh: DeviceMesh, policy: MixedPrecisionPolicy, offloading: OffloadPolicy, *, keep: bool
) -> list[FSDPModule]:
    """Applies FSDP2 over `mesh` with one group per layer; returns the groups within the model in execution order.

    `keep` leaves weights unsharded between forward and backward (ZeRO-2).
    """
    # With output_dtype on layers, the next layer or the head would get inputs of another dtype than its weights.
    inner = replace(policy, output_dtype=None)
    groups = [model.get_submodule(name) for name in layer_names(model)]
    embedding = model.get_input_embeddings()
    if own_group(model, embedding, groups[0]):
        groups.insert(0, embedding)
    for group in groups:
        fully_shard(group, mesh=mesh, reshard_after_forward=not keep, mp_policy=inner, offload_policy=offloading)
    trained = any(parameter.requires_grad for parameter in model.parameters())
    # In training the backward pass needs the head first; in a frozen model nothing else would free its weights.
    free = not (keep or trained)
    fully_shard(model, mesh=mesh, reshard_after_forward=free, mp_policy=policy, offload_policy=offloading)
    return [group for group in groups if isinstance(group, FSDPModule)]


def own_group(model: PreTrainedModel, embedding: nn.Module, layer: nn.Module) -> bool:
    """Returns whether the input embedding is larger than a layer and no other module uses its weight."""
    if not isinstance(embedding, nn.Embedding):
        return False
    uses = sum(each is embedding.weight for _, each in model.named_parameters(remove_duplicate=False))
    return uses == 1 and embedding.weight.numel() > sum(each.numel() for each in layer.parameters())


def gather_ahead(model: nn.Module, groups: list[FSDPModule], depth: int) -> None:
    """Makes each group prefetch the weights of the next `depth` groups, in the forward and the backward pass."""
    order = [model, *groups] if isinstance(model, FSDPModule) else groups
    for i, group in enumerate(order):
        group.set_modules_to_forward_prefetch(order[i + 1 : i + 1 + depth])
    order = [*order[:1], *reversed(groups)]
    for i, group in enumerate(order):
        group.set_modules_to_backward_prefetch(order[i + 1 : i + 1 + depth])


def reshard(model: nn.Module) -> None:
    """Frees weights that FSDP left unsharded: the head's, and with zero2 all weights after a forward without
    backward.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def full_tensor(tensor: Tensor) -> Tensor:
    """Returns the full tensor of a sharded weight or gradient, and a plain tensor unchanged; collective over its
    mesh.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    placements = list(tensor.placements)
    for axis in range(len(placements)):  # FSDP sharded last but comes first: in this order each step is one gather
        placements[axis] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


@torch.no_grad()
def gather(model: nn.Module, *, keep: bool = True) -> dict[str, Tensor]:
    """Gathers the full state dict in CPU memory, one weight at a time; each process of the mesh calls it.

    Args:
        keep: Whether this process needs the state dict; otherwise it only takes part in collectives and gets an empty
            dict.
    """
    reshard(model)
    found = {}
    for name, tensor in model.state_dict().items():
        value = full_tensor(tensor)
        if keep:
            found[name] = value.cpu()
    return found
