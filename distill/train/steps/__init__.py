"""Kinds of training step: plain, in windows or micro-batches, cross-tokenizer, fused, on-policy, progressive, pipeline.

Public names are imported on first use, so that importing this package loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distill.train.steps.cross_tokenizer import CrossTokenizerKL
    from distill.train.steps.fused import FusedTerm
    from distill.train.steps.on_policy import OnPolicy, check_on_policy
    from distill.train.steps.on_policy_config import OnPolicyConfig
    from distill.train.steps.progressive import LayerByLayer, check_layer_coverage, stop_after_layer
    from distill.train.steps.signals import check_signals

EXPORTS = {
    "CrossTokenizerKL": "cross_tokenizer",
    "FusedTerm": "fused",
    "LayerByLayer": "progressive",
    "OnPolicy": "on_policy",
    "OnPolicyConfig": "on_policy_config",
    "check_layer_coverage": "progressive",
    "check_on_policy": "on_policy",
    "check_signals": "signals",
    "stop_after_layer": "progressive",
}
__all__ = [
    "CrossTokenizerKL",
    "FusedTerm",
    "LayerByLayer",
    "OnPolicy",
    "OnPolicyConfig",
    "check_layer_coverage",
    "check_on_policy",
    "check_signals",
    "stop_after_layer",
]


def __getattr__(name: str) -> object:
    if name in EXPORTS:
        return getattr(import_module(f"{__name__}.{EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
