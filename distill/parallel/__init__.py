"""Layouts of models over processes: tensor and context parallelism, FSDP, pipeline stages; sharded loading, gathering.

Public names are imported on first use, so that importing this package loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distill.parallel.apply import apply_layout, gather_tensor, reshard
    from distill.parallel.clip import clip_gradients
    from distill.parallel.layout import Layout, check_layout_fits, check_model_fits, parse_layout
    from distill.parallel.load import load_sharded
    from distill.parallel.mesh import build_mesh, find_data_rank, find_segment
    from distill.parallel.pipeline import PipelineForward, PipelineTrainer
    from distill.parallel.pipeline_stage import freeze_embeddings, load_stage, split_layers
    from distill.parallel.tensor_plan import build_tensor_plan
    from distill.parallel.ulysses_attention import exchange_heads

EXPORTS = {
    "Layout": "layout",
    "PipelineForward": "pipeline",
    "PipelineTrainer": "pipeline",
    "apply_layout": "apply",
    "build_mesh": "mesh",
    "build_tensor_plan": "tensor_plan",
    "check_layout_fits": "layout",
    "check_model_fits": "layout",
    "clip_gradients": "clip",
    "exchange_heads": "ulysses_attention",
    "find_data_rank": "mesh",
    "find_segment": "mesh",
    "freeze_embeddings": "pipeline_stage",
    "gather_tensor": "apply",
    "load_sharded": "load",
    "load_stage": "pipeline_stage",
    "parse_layout": "layout",
    "reshard": "apply",
    "split_layers": "pipeline_stage",
}
__all__ = [
    "Layout",
    "PipelineForward",
    "PipelineTrainer",
    "apply_layout",
    "build_mesh",
    "build_tensor_plan",
    "check_layout_fits",
    "check_model_fits",
    "clip_gradients",
    "exchange_heads",
    "find_data_rank",
    "find_segment",
    "freeze_embeddings",
    "gather_tensor",
    "load_sharded",
    "load_stage",
    "parse_layout",
    "reshard",
    "split_layers",
]


def __getattr__(name: str) -> object:
    if name in EXPORTS:
        return getattr(import_module(f"{__name__}.{EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
