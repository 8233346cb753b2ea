"""The boundaries between the packages, read from the imports."""

import ast
import subprocess
import sys
from collections import defaultdict
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from support.commands import ROOT

FILES = sorted(file for package in ("distill", "compress", "pipelines") for file in (ROOT / package).rglob("*.py"))


@cache
def imports(file: Path) -> set[str]:
    """Dotted names of every module that the file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module}
    return found


def inside(file: Path, *folders: str) -> bool:
    return any(str(file.relative_to(ROOT)).startswith(folder) for folder in folders)


def offenders(files: list[Path], *forbidden: str) -> list[str]:
    return [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in files
        for name in imports(file)
        if any(name == f or name.startswith(f"{f}.") for f in forbidden)
    ]


PACKAGES = (  # each imports from those above it only
    "distill",
    "compress",
    "distill.checkpoint",
    "distill.slicing.tracing",
    "distill.slicing",
    "distill.losses",
    "distill.data",
    "distill.data.sources",
    "distill.data.splits",
    "distill.data.batches",
    "distill.data.clean",
    "distill.data.stored",
    "distill.data.alignment",
    "distill.data.masking",
    "distill.data.rows",
    "distill.data.augment",
    "distill.data.select",
    "distill.models",
    "distill.parallel",
    "distill.student",
    "distill.tasks",
    "distill.cache.signals",
    "distill.cache.format",
    "distill.cache",
    "distill.teacher",
    "distill.train.steps",
    "distill.train",
    "compress.prune",
    "compress.prune.importance",
    "compress.prune.search",
    "compress.prune.vocabulary",
    "compress.quantize",
    "compress.sparsity",
    "compress.measure",
    "compress.export.common",
    "compress.export.onnx",
    "compress.export.openvino",
    "compress.export.pytorch",
    "compress.export.executorch",
    "compress.export.litert",
    "compress.export.static_vectors",
    "compress.export",
    "compress.cascade",
    "pipelines.settings",
    "pipelines.runs",
    "pipelines.reports",
    "pipelines.stages.prepare",
    "pipelines.stages.cache",
    "pipelines.stages.train",
    "pipelines.stages.deliver",
    "pipelines.stages.prune",
    "pipelines.stages",
    "pipelines.launchers",
    "pipelines.planner",
    "pipelines",
)


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(file): file for file in FILES}


@cache
def own_imports(name: str) -> set[str]:
    """Modules of this repository that a module imports, at its top or when it is called."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & set(MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found |= {inner if inner in MODULES else node.module} & set(MODULES)
    return found - {name}


def package_of(module: str) -> str:
    """Returns the innermost package that a module is in."""
    while module and module not in PACKAGES:
        module = module.rpartition(".")[0]
    return module


def test_every_module_is_in_a_known_package():
    assert {package_of(name) for name in MODULES} <= set(PACKAGES)


def test_imports_between_packages_run_one_way():
    place = {package: number for number, package in enumerate(PACKAGES)}
    upward = [
        f"{name} imports {other}"
        for name in MODULES
        for other in own_imports(name)
        if place[package_of(other)] > place[package_of(name)]
    ]
    assert not upward


def test_no_circle_of_imports_between_modules():
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            for other in sorted(own_imports(name)):
                visit(other, (*path, name))
            done.add(name)

    for name in MODULES:
        visit(name, ())


def test_distill_imports_neither_compress_nor_pipelines_and_compress_no_pipelines():
    assert not offenders([f for f in FILES if inside(f, "distill/")], "compress", "pipelines")
    assert not offenders([f for f in FILES if inside(f, "compress/")], "pipelines")


def test_compress_imports_nothing_of_distill_that_trains():
    allowed = ("distill.checkpoint", "distill.slicing", "distill.errors", "distill.eval_mode")
    for file in (f for f in FILES if inside(f, "compress/")):
        theirs = {name for name in imports(file) if name.split(".")[0] == "distill"}
        assert theirs <= {name for name in theirs if name.startswith(allowed)}, file


def test_losses_import_torch_and_their_siblings_only():
    for file in (f for f in FILES if inside(f, "distill/losses/")):
        ours = {name for name in imports(file) if name.startswith("distill.")}
        assert ours <= {name for name in ours if name.startswith("distill.losses") or name == "distill.errors"}, file


@pytest.mark.parametrize("name", ["wandb", "rich", "os.environ", "lightning.pytorch.loggers"])
def test_only_pipelines_talk_to_terminals_and_services(name: str):
    assert not offenders([f for f in FILES if not inside(f, "pipelines/")], name)


@pytest.mark.parametrize(
    ("library", "homes"),
    [
        (
            "onnxruntime",
            [
                *(f"compress/export/onnx/{name}.py" for name in ("graph", "fuse", "int8")),
                "compress/cascade/reader.py",
            ],
        ),
        ("openvino", ["compress/export/openvino/ir.py"]),
        ("onnx", ["compress/export/"]),
        ("executorch", ["compress/export/executorch/program.py"]),
        ("model2vec", ["compress/export/static_vectors/model2vec.py"]),
        ("sentence_transformers", ["compress/export/static_vectors/static_embedding.py"]),
        ("litert_torch", ["compress/export/litert/model.py"]),
        ("ai_edge_litert", [f"compress/export/litert/{name}.py" for name in ("integers", "model", "tflite")]),
        ("compressed_tensors", ["compress/export/pytorch/compressed_tensors.py"]),
        (
            "torchao",
            [
                "compress/export/pytorch/torchao.py",
                "compress/export/executorch/program.py",
                "compress/measure/precision_modes.py",
            ],
        ),
    ],
)
def test_export_libraries_stay_in_their_own_file(library: str, homes: list[str]):
    assert not offenders([f for f in FILES if not inside(f, *homes)], library)


def test_the_reading_side_of_onnx_needs_no_torch():
    code = "import sys, compress.export.onnx.graph; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", code], check=True)


TORCH_FREE = ["distill", "compress", "pipelines", "pipelines.settings.resolve", "pipelines.runs.cli"]
TORCH_FREE += ["distill.checkpoint.custom_models", "distill.slicing", "distill.cache", "distill.data", "distill.tasks"]
TORCH_FREE += [f"distill.checkpoint.{name}" for name in ("checkpoint", "folder", "config", "headers")]


@pytest.mark.parametrize("package", TORCH_FREE)
def test_importing_a_package_touches_no_torch(package: str):
    code = f"import sys, {package}; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_file_is_called_utils():
    for file in FILES:
        assert file.stem not in ("utils", "helpers", "common"), file


INITIALIZED = [module for module, file in MODULES.items() if file.name == "__init__.py"]


@pytest.mark.parametrize("package", INITIALIZED)
def test_every_public_name_of_a_package_can_be_imported(package: str):
    module = import_module(package)
    assert [name for name in getattr(module, "__all__", []) if not hasattr(module, name)] == []
    assert set(getattr(module, "EXPORTS", {})) <= set(getattr(module, "__all__", []))


COPIED = (  # beside checkpoints, which must load without Stillroom
    ROOT / "distill/checkpoint/custom_models/modeling_pruned.py",
    ROOT / "distill/checkpoint/custom_models/modeling_token_vectors.py",
    ROOT / "compress/export/arrays/reader.py",
    ROOT / "compress/cascade/reader.py",
)
SHARED_NAMES = {  # one of each in every module of a kind
    "EXAMPLES": "of a command's help",
    "EXPORTS": "public names of a package, by their module",
    "VERSION": "of a stage's results",
    "decode": "of a signal's records",
    "encode": "of a signal's records",
    "main": "entry point of a command",
}


def public_names(file: Path) -> set[str]:
    found = set()
    for node in ast.parse(file.read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
    return {name for name in found if not name.startswith("_")}


def test_no_public_name_is_defined_twice():
    places = defaultdict(list)
    for file in FILES:
        if file not in COPIED:
            for name in public_names(file) - SHARED_NAMES.keys():
                places[name].append(str(file.relative_to(ROOT)))
    assert len(places) > 1000
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_no_frozen_object_changes_itself():
    assert [str(file.relative_to(ROOT)) for file in FILES if "object.__setattr__" in file.read_text()] == []
