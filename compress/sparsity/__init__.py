"""Sparse training and one-shot pruning of weights: scores, masks, schedules and plain checkpoints with zeros.

`sparsify` sets weights to zero at once; `prepare_sparse`, training with the returned `SparseTraining`, and
`convert_sparse` introduce the zeros while the model trains. Public names are imported on first use, so that importing
this package loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compress.sparsity.config import SparsityConfig
    from compress.sparsity.layers import compute_zero_shares, find_sparsifiable_layers
    from compress.sparsity.oneshot import sparsify
    from compress.sparsity.patterns import Masks
    from compress.sparsity.schedule import SparsitySchedule
    from compress.sparsity.training import SparseTraining, convert_sparse, prepare_sparse

EXPORTS = {
    "Masks": "patterns",
    "SparseTraining": "training",
    "SparsityConfig": "config",
    "SparsitySchedule": "schedule",
    "compute_zero_shares": "layers",
    "convert_sparse": "training",
    "find_sparsifiable_layers": "layers",
    "prepare_sparse": "training",
    "sparsify": "oneshot",
}
__all__ = [
    "Masks",
    "SparseTraining",
    "SparsityConfig",
    "SparsitySchedule",
    "compute_zero_shares",
    "convert_sparse",
    "find_sparsifiable_layers",
    "prepare_sparse",
    "sparsify",
]


def __getattr__(name: str) -> object:
    if name in EXPORTS:
        return getattr(import_module(f"{__name__}.{EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
