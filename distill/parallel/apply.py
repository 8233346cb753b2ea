"""Sharding of a model over a mesh: tensor or context parallelism first, then FSDP2 over the other processes."""

from collections import defaultdict
from dataclasses import replace

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import PreTrainedModel

from distill.checkpoint.layers import find_layer_names
from distill.errors import InputError
from distill.parallel.layout import Layout, check_model_fits
from distill.parallel.mesh import select_data_mesh
from distill.parallel.tensor_plan import build_tensor_plan
from distill.parallel.ulysses_attention import exchange_heads


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
    """Shards the model's weights and its attention in place according to the layout; each process of the mesh calls it.

    A layout that shards neither (`replicated`, `zero1`) leaves the model unchanged, for DDP. Each process must have the
    same weights, or all weights on the meta device (see `load_sharded`).

    Args:
        model: Frozen or to be trained. FSDP reshards the weights of a frozen model after every forward pass.
        layout: Layout without pp; a pipeline stage is not a complete model.
        mesh: From `build_mesh(layout, ...)`.
        exact: Shard products by columns only; bit-identical to the unsharded model for most sizes on CPU (see
            `build_tensor_plan`).
        policy: Dtypes of FSDP's weights and reductions; its `output_dtype` applies to the output of the model only.
        offload: FSDP keeps its shards, their gradients and the optimizer state in CPU memory.
        prefetch: Number of layers whose weights are gathered ahead of the current layer.

    Raises:
        InputError: Heads or widths can't be divided evenly, the family has no plan, or the model has no list of layers.
        ValueError: The layout has pipeline stages.
    """
    if layout.pp > 1:
        raise ValueError(f"layout {layout}: expected a layout without pp: load_stage loads the stages of a pipeline")
    if layout.tp > 1:
        _apply_tensor_parallel(model, layout, mesh["tp"], exact=exact)
    if layout.cp > 1:
        check_model_fits(layout, model.config, "layout")
        exchange_heads(model, mesh.get_group("cp"))
    if layout.uses_fsdp:
        policy = policy or MixedPrecisionPolicy()
        offloading = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
        data_mesh = select_data_mesh(mesh, layout)
        groups = _apply_fsdp(model, data_mesh, policy, offloading, keep_gathered=layout.zero == 2)
        _set_prefetch(model, groups, prefetch)
    return model


def _apply_tensor_parallel(model: PreTrainedModel, layout: Layout, mesh: DeviceMesh, *, exact: bool) -> None:
    """Applies tensor parallelism over the 1-D `mesh`; weights shared by several modules stay shared."""
    check_model_fits(layout, model.config, "layout")
    plan = build_tensor_plan(model, exact=exact)
    for name, style in plan.items():
        _check_divisible(model, name, style, mesh.size())
    shared = _find_shared_parameters(model)
    for name, style in plan.items():
        parallelize_module(model.get_submodule(name), mesh, style, src_data_rank=None)
    for registrations in shared:
        parameters = [getattr(module, name) for module, name in registrations]
        sharded = next((each for each in parameters if isinstance(each, DTensor)), parameters[0])
        for module, name in registrations:
            setattr(module, name, sharded)


def _check_divisible(model: PreTrainedModel, name: str, style: ParallelStyle, parts: int) -> None:
    """Checks that torch can shard a module into `parts` equal slices.

    Raises:
        InputError: The module has an unsupported type, or its width is not divisible by `parts`.
    """
    if not isinstance(style, ColwiseParallel | RowwiseParallel):
        return
    module = dict(model.named_modules()).get(name)
    if not isinstance(module, nn.Linear | nn.Embedding):
        found = "a bare parameter" if module is None else type(module).__name__
        raise InputError(
            f"tp={parts}: {name}: expected nn.Linear or nn.Embedding, found {found}: it can't be sharded; use fsdp=N"
        )
    if isinstance(module, nn.Linear):
        sizes = {
            "inputs": (module.in_features, style.input_layouts),
            "outputs": (module.out_features, style.output_layouts),
        }
        for kind, (size, (placement,)) in sizes.items():
            if isinstance(placement, Shard) and size % parts:
                raise InputError(
                    f"tp={parts}: {name}: expected a number of {kind} divisible by {parts}, found {size}: the shards "
                    "would differ in size"
                )


def _find_shared_parameters(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Returns the registrations (module, name) of each parameter that has more than one."""
    registrations: dict[Tensor, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            registrations[parameter].append((module, name))
    return [each for each in registrations.values() if len(each) > 1]


def _apply_fsdp(
    model: PreTrainedModel,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    offloading: OffloadPolicy,
    *,
    keep_gathered: bool,
) -> list[FSDPModule]:
    """Applies FSDP2 over `mesh` with one group per layer; returns the groups within the model in execution order.

    `keep_gathered` leaves weights unsharded between forward and backward (ZeRO-2).
    """
    # With output_dtype on layers, the next layer or the head would get inputs of another dtype than its weights.
    inner = replace(policy, output_dtype=None)
    groups = [model.get_submodule(name) for name in find_layer_names(model)]
    embedding = model.get_input_embeddings()
    if _needs_own_group(model, embedding, groups[0]):
        groups.insert(0, embedding)
    for group in groups:
        fully_shard(
            group, mesh=mesh, reshard_after_forward=not keep_gathered, mp_policy=inner, offload_policy=offloading
        )
    is_trained = any(parameter.requires_grad for parameter in model.parameters())
    # In training the backward pass needs the head first; in a frozen model nothing else would free its weights.
    reshard_root = not (keep_gathered or is_trained)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard_root, mp_policy=policy, offload_policy=offloading)
    return [group for group in groups if isinstance(group, FSDPModule)]


def _needs_own_group(model: PreTrainedModel, embedding: nn.Module, layer: nn.Module) -> bool:
    """Returns whether the input embedding is larger than a layer and no other module uses its weight."""
    if not isinstance(embedding, nn.Embedding):
        return False
    uses = sum(each is embedding.weight for _, each in model.named_parameters(remove_duplicate=False))
    return uses == 1 and embedding.weight.numel() > sum(each.numel() for each in layer.parameters())


def _set_prefetch(model: nn.Module, groups: list[FSDPModule], depth: int) -> None:
    """Makes each group prefetch the weights of the next `depth` groups, in the forward and the backward pass."""
    order = [model, *groups] if isinstance(model, FSDPModule) else groups
    for i, group in enumerate(order):
        group.set_modules_to_forward_prefetch(order[i + 1 : i + 1 + depth])
    order = [*order[:1], *reversed(groups)]
    for i, group in enumerate(order):
        group.set_modules_to_backward_prefetch(order[i + 1 : i + 1 + depth])


def keep_layer_gathered(model: PreTrainedModel, layer: int) -> None:
    """Keeps the weights of a layer, counted from 0, gathered from the forward to the backward pass, if FSDP shards it.

    FSDP gathers them again when a gradient reaches the layer's output. A loss on what is computed within the layer
    alone sends none there, and its backward pass would find no weights.
    """
    module = model.get_submodule(find_layer_names(model)[layer])
    if isinstance(module, FSDPModule):
        module.set_reshard_after_forward(False)


def reshard(model: nn.Module) -> None:
    """Frees weights that FSDP left unsharded.

    These are the head's, and with zero2 all weights after a forward pass without a backward pass.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def gather_tensor(tensor: Tensor) -> Tensor:
    """Returns the full tensor of a sharded weight or gradient, and a plain tensor unchanged.

    Every process of the tensor's mesh calls it.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    placements = list(tensor.placements)
    for axis in range(len(placements)):  # FSDP sharded last but comes first: in this order each step is one gather
        placements[axis] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()
