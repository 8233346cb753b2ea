"""Training of a student: the Lightning module, its optimizer, and the layer terms.

Public names are imported on first use, so that importing this package loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distill.train.balance import GradientBalance
    from distill.train.config import TrainConfig
    from distill.train.module import DistillationModule
    from distill.train.optimizer import build_optimizer, set_dropout
    from distill.train.schedule import build_schedule
    from distill.train.steps.layer_terms import LayerTerms

EXPORTS = {
    "DistillationModule": "module",
    "GradientBalance": "balance",
    "LayerTerms": "steps.layer_terms",
    "TrainConfig": "config",
    "build_optimizer": "optimizer",
    "build_schedule": "schedule",
    "set_dropout": "optimizer",
}
__all__ = [
    "DistillationModule",
    "GradientBalance",
    "LayerTerms",
    "TrainConfig",
    "build_optimizer",
    "build_schedule",
    "set_dropout",
]


def __getattr__(name: str) -> object:
    if name in EXPORTS:
        return getattr(import_module(f"{__name__}.{EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
