"""Places a model on the processes of a run: built once, then loaded by each process in shards."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.export.common.huggingface import WEIGHTS, export_huggingface
from distill.checkpoint.sentence_folder import write_form
from distill.models.sentence_encoder import PooledModel
from distill.parallel.apply import reshard
from distill.parallel.layout import Layout
from distill.parallel.load import load_sharded
from distill.parallel.mesh import mesh_of
from distill.parallel.pipeline import PipelineTrainer
from distill.parallel.pipeline_stage import load_stage
from pipelines.runs.stage import SCRATCH, Run, replacing
from pipelines.runs.training_checkpoint import is_rank_zero, untied

INITIAL = "initial"


def build_placed_model(
    run: Run,
    layout: Layout,
    folder: Path,
    build: Callable[[], PreTrainedModel],
    auto_class: Any,
    *,
    offload: bool = False,
    prefetch: int = 1,
) -> tuple[PreTrainedModel, DeviceMesh | None]:
    """Returns the model built by `build()` in the given layout, and its mesh; every process of the run calls it.

    The first process alone builds the model, and stores it in the stage's scratch folder for a restarted run.
    """
    if layout.processes == 1:
        return build(), None
    initial = folder / SCRATCH / INITIAL
    if run.world.is_rank_zero and not initial.exists():
        with replacing(initial) as fresh:
            build().save_pretrained(fresh)
    run.world.barrier()
    mesh = mesh_of(layout, device_type())
    return laid_out(initial, auto_class, layout, mesh, offload=offload, prefetch=prefetch), mesh


def device_type() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def laid_out(
    folder: Path,
    auto_class: Any,
    layout: Layout,
    mesh: DeviceMesh,
    *,
    frozen: bool = False,
    offload: bool = False,
    prefetch: int = 1,
) -> PreTrainedModel:
    """Returns this process's shards of a checkpoint, in eval mode.

    A frozen model computes bit-identical outputs to an unsharded one.
    """
    if layout.pp > 1:
        stage = load_stage(folder, auto_class, mesh.get_local_rank("pp"), layout.pp)
        return stage.requires_grad_(not frozen).to(device_type())  # type: ignore[arg-type]
    return load_sharded(
        folder, auto_class, layout, mesh, frozen=frozen, exact=frozen, offload=offload, prefetch=prefetch
    )


def stages_of(stage: PreTrainedModel, layout: Layout, mesh: DeviceMesh | None) -> PipelineTrainer | None:
    """Returns the trainer of a pipeline-parallel model; None for other layouts."""
    if mesh is None or layout.pp == 1:
        return None
    return PipelineTrainer(stage, mesh.get_group("pp"), copies=mesh.get_group("dp"))


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes a stock checkpoint of a model in any layout; every process calls it.

    If weights are sharded, each process writes its shards, which are merged on disk, so that no process holds all
    weights.
    """
    reshard(model)  # after an evaluation the weights are still gathered, and the model appears unsharded
    if not hasattr(model, "relay") and not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        if is_rank_zero():
            export_huggingface(model, tokenizer, folder)
        return
    tensors: dict[str, Tensor] = untied(model)
    names: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(names, list(tensors))
    parts = folder.with_name(f"{folder.name}.parts")
    writer = HuggingFaceStorageWriter(
        str(parts),
        fqn_to_index_mapping=dict.fromkeys(sum(names, []), 1),
        save_distributed=True,
        enable_consolidation=True,
    )
    dcp.save(tensors, storage_writer=writer)
    if is_rank_zero():
        folder.mkdir(parents=True, exist_ok=True)
        found = sorted(parts.glob("*.safetensors"))
        found[0].replace(folder / WEIGHTS)
        model.config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        if isinstance(model, PooledModel):
            write_form(model.form, model.config.hidden_size, [], folder)
        shutil.rmtree(parts)
