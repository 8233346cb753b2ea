"""Loading of a checkpoint into a sharded model without materialising all weights on any process."""

import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint import load as load_checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoConfig, GenerationConfig, PreTrainedModel

from distill.checkpoint.auto_class import AutoClass
from distill.checkpoint.headers import read_headers
from distill.checkpoint.load_report import list_names
from distill.checkpoint.weights import is_integer_weight, load_model
from distill.errors import InputError
from distill.parallel.apply import apply_layout
from distill.parallel.layout import Layout

_SHOWN = 5  # maximum number of names in an error message


def load_sharded(
    folder: Path,
    auto_class: AutoClass,
    layout: Layout,
    mesh: DeviceMesh,
    *,
    dtype: torch.dtype = torch.float32,
    frozen: bool = False,
    exact: bool = False,
    policy: MixedPrecisionPolicy | None = None,
    offload: bool = False,
    prefetch: int = 1,
    **from_config_kwargs: Any,
) -> PreTrainedModel:
    """Loads the checkpoint in `folder`, sharded over the mesh, in eval mode; each process of the mesh calls it.

    The model is built without memory for its weights and sharded; then each process reads its own slices from the
    safetensors files. For a layout that shards no weights the model is loaded by `from_pretrained`.

    Args:
        folder: Checkpoint with config.json and safetensors.
        auto_class: A transformers auto class that fits the checkpoint.
        layout: Layout without pp.
        mesh: From `build_mesh(layout, ...)`.
        dtype: Dtype of all weights.
        frozen: Load without gradients; FSDP then frees every weight after a forward pass, whereas training keeps some
            for the backward pass.
        exact: See `apply_layout`.
        policy: See `apply_layout`.
        offload: See `apply_layout`.
        prefetch: See `apply_layout`.
        from_config_kwargs: Passed to `auto_class.from_config`, such as `attn_implementation`.

    Raises:
        InputError: Names or shapes in the files differ from the model's, or the files are damaged; and as in
            `apply_layout`.
    """
    if not layout.shards_gradients:
        model: PreTrainedModel = load_model(auto_class, folder, dtype=dtype, **from_config_kwargs)
        model.requires_grad_(not frozen).to(mesh.device_type)  # type: ignore[arg-type]
        model.eval()
        return apply_layout(model, layout, mesh)
    with parameters_on_meta():
        config = AutoConfig.from_pretrained(folder)
        model = auto_class.from_config(config, dtype=dtype, **from_config_kwargs)
    names = match_weights(model, folder)
    model.requires_grad_(not frozen)
    apply_layout(model, layout, mesh, exact=exact, policy=policy, offload=offload, prefetch=prefetch)
    allocate_parameters(model, torch.device("cpu" if offload else mesh.device_type), torch.device(mesh.device_type))
    _read_slices(model, names, folder)
    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    model.eval()
    return model


def _read_slices(model: nn.Module, names: Mapping[str, str], folder: Path) -> None:
    """Reads the model's weights, or this process's slices of them; `names` maps names in the files to the model's."""
    tensors = model.state_dict()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # intended: processes read separately
        load_checkpoint(
            {stored: tensors[name] for stored, name in names.items()},
            storage_reader=HuggingFaceStorageReader(str(folder)),
            no_dist=True,
        )


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Puts parameters registered within the context on the meta device.

    Buffers stay real, since most of them are in no file.
    """

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:  # the same object: a tied weight stays tied
            return parameter
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()


def allocate_parameters(model: nn.Module, parameters: torch.device, buffers: torch.device) -> None:
    """Allocates uninitialized memory for parameters on the meta device and moves buffers; tied weights stay tied."""
    allocated: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter.is_meta and parameter not in allocated:
                empty = torch.empty_like(parameter, device=parameters)
                allocated[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            if parameter.is_meta:
                setattr(module, name, allocated[parameter])
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(module, name, buffer.to(buffers))


def match_weights(model: PreTrainedModel, folder: Path) -> dict[str, str]:
    """Returns the name in the model of each weight by its name in the files.

    Of the names of a tied weight, the one that the files contain is used.

    Raises:
        InputError: Weights are missing, unexpected or of another shape.
    """
    stored = _read_shapes(folder)
    names: dict[Tensor, list[str]] = defaultdict(list)
    for name, tensor in model.state_dict(keep_vars=True).items():
        names[tensor].append(name)
    matched, missing, reshaped = {}, [], []
    for tensor, aliases in names.items():
        stored_name = next((name for name in aliases if name in stored), None)
        if stored_name is None:
            missing.append(aliases[0])
        elif stored[stored_name] != tuple(tensor.shape):
            reshaped.append(
                f"{stored_name}: {list(stored[stored_name])} in the files, {list(tensor.shape)} in the model"
            )
        else:
            matched[stored_name] = aliases[0]
    buffers = {name for name, _ in model.named_buffers()}
    unexpected = sorted(stored.keys() - {name for aliases in names.values() for name in aliases} - buffers)
    problems = [
        f"{kind} {len(affected)} ({', '.join(affected[:_SHOWN])}{', ...' if len(affected) > _SHOWN else ''})"
        for kind, affected in (("missing", missing), ("unexpected", unexpected), ("of another shape", reshaped))
        if affected
    ]
    if problems:
        raise InputError(
            f"checkpoint {str(folder)!r}: expected the weights of a {type(model).__name__}, found others: "
            f"{'; '.join(problems)}"
        )
    return matched


def _read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each weight in the files that transformers would read.

    Raises:
        InputError: As in `read_headers`, or weights are integers.
    """
    headers = read_headers(folder)
    integers = [f"{name} as {each.dtype}" for name, each in sorted(headers.items()) if is_integer_weight(name, each)]
    if integers:
        raise InputError(
            f"checkpoint {str(folder)!r}: expected weights as floating-point numbers, found {list_names(integers)}: "
            "integers need the scales of a quantized checkpoint"
        )
    return {name: header.shape for name, header in headers.items()}
