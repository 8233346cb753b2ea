"""Tensor-parallel plans: how each module of a transformers model is sharded over a tensor-parallel group."""

from collections.abc import Iterator, Mapping
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from transformers import PreTrainedModel

from distill.checkpoint.layers import find_layer_names
from distill.errors import InputError

_BERT: Final = {
    "attention.self.query": "colwise",
    "attention.self.key": "colwise",
    "attention.self.value": "colwise",
    "attention.output.dense": "rowwise",
    "intermediate.dense": "colwise",
    "output.dense": "rowwise",
}
_DISTILBERT: Final = {
    "attention.q_lin": "colwise",
    "attention.k_lin": "colwise",
    "attention.v_lin": "colwise",
    "attention.out_lin": "rowwise",
    "ffn.lin1": "colwise",
    "ffn.lin2": "rowwise",
}
# Plans within a layer, by model type: transformers has none for encoders.
_ENCODERS: Final[Mapping[str, Mapping[str, str]]] = {
    "bert": _BERT,
    "roberta": _BERT,
    "xlm-roberta": _BERT,
    "camembert": _BERT,
    "electra": _BERT,
    "distilbert": _DISTILBERT,
}


class _SummedGradients(ParallelStyle):
    """Replicates weights and all-reduces their partial gradients, as for a per-head norm with sharded heads."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()
        hooked: dict[str, Tensor] = {}

        def sum_gradient(gradient: Tensor) -> Tensor:
            total = gradient.clone()
            dist.all_reduce(total, group=group)
            return total

        def hook_parameters(module: nn.Module, inputs: tuple[object, ...]) -> None:
            if not torch.is_grad_enabled():
                return
            for name, parameter in module.named_parameters(recurse=False):
                # Checked in each forward pass, since FSDP and loading replace the parameter's tensor.
                if parameter.requires_grad and hooked.get(name) is not parameter:
                    parameter.register_hook(sum_gradient)
                    hooked[name] = parameter

        module.register_forward_pre_hook(hook_parameters)
        return module


def _parallel_styles(*, exact: bool) -> dict[str, ParallelStyle | None]:
    """Returns torch's parallel styles by their names in transformers' plans; None leaves the module unchanged."""
    gathered = ColwiseParallel(output_layouts=Replicate())
    after_gather = ColwiseParallel(input_layouts=Shard(-1), output_layouts=Replicate())
    split_input = gathered if exact else RowwiseParallel(input_layouts=Replicate())
    return {
        "colwise": ColwiseParallel(),
        "colwise_gather_output": gathered,
        "colwise_rep": gathered,
        "rowwise": after_gather if exact else RowwiseParallel(),
        "rowwise_split_input": split_input,
        "rowwise_rep": split_input,
        "embedding_rowwise": RowwiseParallel(input_layouts=Replicate()),
        "embedding_colwise": gathered,
        "replicated_with_grad_allreduce": _SummedGradients(),
        "replicate": None,
    }


def build_tensor_plan(model: PreTrainedModel, *, exact: bool) -> dict[str, ParallelStyle]:
    """Returns the parallel style of each sharded module by its name.

    For decoders this is transformers' own plan, for encoders one of this module.

    The input embedding is sharded by its width, or by its vocabulary if the output shares it. The vocabulary output is
    gathered, so that logits are plain tensors that are equal on all processes. Modules outside the plan are replicated.

    `exact=True` is for a frozen teacher: row-wise products, whose partial sums are added over the processes with
    different rounding, become column-wise products on a gathered input. Each value is then one sum of the same
    products, at the cost of one more gather and twice the input; it is bit-identical to the unsharded model's if the
    matrix library sums a few columns in the same way as many. On CPU (torch 2.13 with MKL, one thread; widths 32 to
    3072, 2 to 2048 tokens, 2 and 4 processes) this always holds in bfloat16, and in float32 except for slices of 8
    columns (4 in 10 000 000 differ) and for 2 tokens times a vocabulary of 30522. The bits of a product of a single
    row, as in a classifier over one text, depend on the memory address of the weight: two loads of an unsharded model
    may differ. GPU libraries give no such guarantee; `fsdp` multiplies full weights, so only the caveat about a single
    row applies to it.

    Raises:
        InputError: The family has no plan, or its plan uses an unsupported style.
    """
    styles = _parallel_styles(exact=exact)
    names = dict(_list_planned_styles(model))
    if not names:
        raise InputError(
            f"tp: expected a model type with a tensor-parallel plan in transformers, or {', '.join(_ENCODERS)}, "
            f"found {type(model).__name__} ({model.config.model_type}): its modules can't be sharded; use fsdp=N"
        )
    names |= _find_vocabulary_styles(model)
    plan: dict[str, ParallelStyle] = {}
    for name, style_name in names.items():
        if style_name not in styles:
            raise InputError(
                f"tp: {type(model).__name__}: expected a plan with the styles {', '.join(styles)}, found "
                f"{style_name!r} for {name}: it can't be sharded; use fsdp=N"
            )
        style = styles[style_name]
        if style is not None:
            plan[name] = style
    return plan


def _list_planned_styles(model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    """Yields the name and style of each module or bare parameter in the plan."""
    layer_plan = _ENCODERS.get(model.config.model_type)
    if layer_plan is not None:
        for name in find_layer_names(model):
            yield from ((f"{name}.{part}", style) for part, style in layer_plan.items())
        return
    model_plan = model.tp_plan or {}
    modules = [name for name, _ in model.named_modules()]
    for name in [*modules, *(name for name, _ in model.named_parameters())]:
        style = model_plan.get(".".join("*" if part.isdigit() else part for part in name.split(".")))
        if style is not None:
            yield name, style


def _find_vocabulary_styles(model: PreTrainedModel) -> dict[str, str]:
    """Returns the styles of the input embedding and of the vocabulary output, if the model has them."""
    names = {module: name for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    styles = {}
    if isinstance(embedding, nn.Embedding):
        is_tied = head is not None and head.weight is embedding.weight
        styles[names[embedding]] = "embedding_rowwise" if is_tied else "embedding_colwise"
    if isinstance(head, nn.Linear):
        styles[names[head]] = "colwise_gather_output"
    return styles
