"""The walls between the packages, read from the imports."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from support.commands import ROOT

FILES = sorted(file for package in ("distill", "compress", "pipelines") for file in (ROOT / package).rglob("*.py"))


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


def test_distill_does_not_know_compress_nor_either_the_pipelines():
    assert not offenders([f for f in FILES if inside(f, "distill/")], "compress", "pipelines")
    assert not offenders([f for f in FILES if inside(f, "compress/")], "pipelines")


def test_compress_stands_on_the_checkpoints_of_distill_and_on_nothing_else_of_it():
    for file in (f for f in FILES if inside(f, "compress/")):
        theirs = {name for name in imports(file) if name.split(".")[0] == "distill"}
        assert theirs <= {name for name in theirs if name.startswith("distill.checkpoint.")} | {"distill.errors"}, file


def test_checkpoints_are_the_ground_floor():
    for file in (f for f in FILES if inside(f, "distill/checkpoint/")):
        ours = {name for name in imports(file) if name.split(".")[0] in ("distill", "compress", "pipelines")}
        assert ours <= {name for name in ours if name.startswith("distill.checkpoint.")} | {"distill.errors"}, file


@pytest.mark.parametrize("room", ["data", "teacher", "student"])
def test_the_rooms_of_distill_do_not_import_one_another(room: str):
    others = [f"distill.{name}" for name in ("data", "teacher", "student") if name != room]
    assert not offenders([f for f in FILES if inside(f, f"distill/{room}/")], *others, "distill.train.module")


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
            ["compress/export/onnx/graph.py", "compress/export/onnx/fuse.py", "compress/export/onnx/int8.py"],
        ),
        ("openvino", ["compress/export/openvino/ir.py"]),
        ("onnx", ["compress/export/"]),
        ("executorch", ["compress/export/executorch/program.py"]),
        ("litert_torch", ["compress/export/litert/model.py"]),
        ("ai_edge_litert", ["compress/export/litert/model.py", "compress/export/litert/tflite.py"]),
        ("compressed_tensors", ["compress/export/pytorch/compressed_tensors.py"]),
        (
            "torchao",
            [
                "compress/export/pytorch/torchao.py",
                "compress/export/executorch/program.py",
                "compress/measure/training_precision.py",
            ],
        ),
    ],
)
def test_export_libraries_stay_in_their_own_file(library: str, homes: list[str]):
    assert not offenders([f for f in FILES if not inside(f, *homes)], library)


def test_the_reading_side_of_onnx_needs_no_torch():
    code = "import sys, compress.export.onnx.graph; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", code], check=True)


TORCH_FREE = ["distill", "compress", "pipelines", "pipelines.settings.distill_config", "pipelines.runs.cli"]
TORCH_FREE += [f"distill.checkpoint.{name}" for name in ("folder", "config", "headers")]


@pytest.mark.parametrize("package", TORCH_FREE)
def test_importing_a_package_touches_no_torch(package: str):
    code = f"import sys, {package}; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_file_is_called_utils_or_grows_past_350_lines():
    for file in FILES:
        assert file.stem not in ("utils", "helpers", "common"), file
        assert len(file.read_text().splitlines()) <= 350, file
