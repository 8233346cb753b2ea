"""Measurement of latency and peak memory, and selection of the fastest training precision on this machine.

Public names are imported on first use, so that importing this package loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compress.measure.latency import Latency, Runner, limit_torch_threads, measure_latency
    from compress.measure.memory import read_peak_memory, reset_peak_memory
    from compress.measure.precision_modes import MODES, PrecisionMode, check_mode, list_candidate_modes
    from compress.measure.precision_speed import choose_fastest_mode, measure_modes, measure_peak_flops

EXPORTS = {
    "Latency": "latency",
    "MODES": "precision_modes",
    "PrecisionMode": "precision_modes",
    "Runner": "latency",
    "check_mode": "precision_modes",
    "choose_fastest_mode": "precision_speed",
    "limit_torch_threads": "latency",
    "list_candidate_modes": "precision_modes",
    "measure_latency": "latency",
    "measure_modes": "precision_speed",
    "measure_peak_flops": "precision_speed",
    "read_peak_memory": "memory",
    "reset_peak_memory": "memory",
}
__all__ = [
    "MODES",
    "Latency",
    "PrecisionMode",
    "Runner",
    "check_mode",
    "choose_fastest_mode",
    "limit_torch_threads",
    "list_candidate_modes",
    "measure_latency",
    "measure_modes",
    "measure_peak_flops",
    "read_peak_memory",
    "reset_peak_memory",
]


def __getattr__(name: str) -> object:
    if name in EXPORTS:
        return getattr(import_module(f"{__name__}.{EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
