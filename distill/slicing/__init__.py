"""The engine that makes a model smaller: tracing of coupled coordinates, and models built from those that are kept.

Public names are imported on first use, so that importing this package loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distill.slicing.build import prune
    from distill.slicing.factorize import factorize_embeddings
    from distill.slicing.masked import mask_model
    from distill.slicing.shape import Shape
    from distill.slicing.tracing.axes import Axis, AxisKind, Kept, Role, Slot
    from distill.slicing.tracing.trace import Traced, find_axes, trace

EXPORTS = {
    "Axis": "tracing.axes",
    "Kept": "tracing.axes",
    "AxisKind": "tracing.axes",
    "Role": "tracing.axes",
    "Shape": "shape",
    "Slot": "tracing.axes",
    "Traced": "tracing.trace",
    "factorize_embeddings": "factorize",
    "find_axes": "tracing.trace",
    "mask_model": "masked",
    "prune": "build",
    "trace": "tracing.trace",
}
__all__ = [
    "Axis",
    "Kept",
    "AxisKind",
    "Role",
    "Shape",
    "Slot",
    "Traced",
    "factorize_embeddings",
    "find_axes",
    "mask_model",
    "prune",
    "trace",
]


def __getattr__(name: str) -> object:
    if name in EXPORTS:
        return getattr(import_module(f"{__name__}.{EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
