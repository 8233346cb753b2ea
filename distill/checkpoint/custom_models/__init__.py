"""Checkpoints of models that no stock class can express: their modelling code, saving, loading and registration.

Public names are imported on first use, so that importing this package loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distill.checkpoint.custom_models.folder import (
        choose_auto_class,
        load_model_folder,
        register_custom_classes,
        save_model_folder,
    )
    from distill.checkpoint.custom_models.model import (
        dense_stock_config,
        embedding_rank,
        has_custom_norms,
        has_token_vectors,
        head_width,
        is_pruned,
        stock_class,
    )

EXPORTS = {
    "choose_auto_class": "folder",
    "dense_stock_config": "model",
    "embedding_rank": "model",
    "head_width": "model",
    "is_pruned": "model",
    "has_custom_norms": "model",
    "has_token_vectors": "model",
    "load_model_folder": "folder",
    "register_custom_classes": "folder",
    "save_model_folder": "folder",
    "stock_class": "model",
}
__all__ = [
    "choose_auto_class",
    "dense_stock_config",
    "embedding_rank",
    "head_width",
    "is_pruned",
    "has_custom_norms",
    "has_token_vectors",
    "load_model_folder",
    "register_custom_classes",
    "save_model_folder",
    "stock_class",
]


def __getattr__(name: str) -> object:
    if name in EXPORTS:
        return getattr(import_module(f"{__name__}.{EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
