"""Infrastructure of runs: stages and manifests, processes, signal handling, checkpoints and terminal output.

Public names are imported on first use, so that importing this package loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipelines.runs.console import Advance, Console, print_error
    from pipelines.runs.files import count_bytes, hash_content, replace_folder, write_json
    from pipelines.runs.launch import launch_processes
    from pipelines.runs.manifest import LOGS, SCRATCH, JsonObject, Manifest, hash_file, hash_json
    from pipelines.runs.output import check_not_removed, check_output
    from pipelines.runs.placement import build_placed_model, load_in_layout, save_model
    from pipelines.runs.processes import LostError, World, join_world, leave_world
    from pipelines.runs.publication import check_publishable, link_tree, republish_folder
    from pipelines.runs.stage import Artefact, Run
    from pipelines.runs.stops import StopRequested
    from pipelines.runs.trainer import fit_module, validate_module
    from pipelines.runs.watchdog import explain_failures

EXPORTS = {
    "Advance": "console",
    "Artefact": "stage",
    "Console": "console",
    "JsonObject": "manifest",
    "LOGS": "manifest",
    "LostError": "processes",
    "Manifest": "manifest",
    "Run": "stage",
    "SCRATCH": "manifest",
    "StopRequested": "stops",
    "World": "processes",
    "build_placed_model": "placement",
    "check_not_removed": "output",
    "check_output": "output",
    "check_publishable": "publication",
    "count_bytes": "files",
    "explain_failures": "watchdog",
    "fit_module": "trainer",
    "hash_content": "files",
    "hash_file": "manifest",
    "hash_json": "manifest",
    "join_world": "processes",
    "launch_processes": "launch",
    "leave_world": "processes",
    "link_tree": "publication",
    "load_in_layout": "placement",
    "print_error": "console",
    "replace_folder": "files",
    "republish_folder": "publication",
    "save_model": "placement",
    "validate_module": "trainer",
    "write_json": "files",
}
__all__ = [
    "Advance",
    "Artefact",
    "Console",
    "JsonObject",
    "LOGS",
    "LostError",
    "Manifest",
    "Run",
    "SCRATCH",
    "StopRequested",
    "World",
    "build_placed_model",
    "check_not_removed",
    "check_output",
    "check_publishable",
    "count_bytes",
    "explain_failures",
    "fit_module",
    "hash_content",
    "hash_file",
    "hash_json",
    "join_world",
    "launch_processes",
    "leave_world",
    "link_tree",
    "load_in_layout",
    "print_error",
    "replace_folder",
    "republish_folder",
    "save_model",
    "validate_module",
    "write_json",
]


def __getattr__(name: str) -> object:
    if name in EXPORTS:
        return getattr(import_module(f"{__name__}.{EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
