"""Every kind of broken input ends a command in time with a message that names the cause and without a traceback, or is
accepted with a remark.
"""

import csv
import json
import re
import sys
from pathlib import Path

import pytest

from pipelines import distill
from pipelines.runs import cli
from pipelines.runs.files import hash_content
from support.broken_inputs import broken_checkpoints, broken_data, broken_runs, broken_settings
from support.broken_inputs.broken_runs import REJECTED_OR_REBUILT, STAGES, folder_of
from support.broken_inputs.case import ACCEPTED, REJECTED, Case, Flags, Workspace, copy_workspace
from support.commands import small_run
from support.tiny_models import build_model, make_rows, saved, word_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
FRESH = [*broken_checkpoints.CASES, *broken_data.CASES, *broken_settings.CASES]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher with a head for the data's labels, a separate student, a headless body, and the data."""
    root = tmp_path_factory.mktemp("pristine")
    tokenizer = word_tokenizer()
    saved(build_model("bert"), tokenizer, root / "teacher")
    saved(build_model("bert", num_hidden_layers=2), tokenizer, root / "student")
    saved(build_model("bert", "Model"), tokenizer, root / "body")
    (root / "data").mkdir()
    for split, count, seed in (("train", 60, 1), ("test", 20, 2)):
        with (root / "data" / f"{split}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("text", "label"), *make_rows(count, seed)])
    return root


@pytest.fixture(scope="module")
def finished_run(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a finished run with its inputs, and the hash of its student."""
    workspace = copy_workspace(pristine, tmp_path_factory.mktemp("finished"))
    assert run(build_arguments(workspace, {})) == ACCEPTED
    return workspace.root, student_hash(workspace)


def build_arguments(workspace: Workspace, more: Flags) -> list[str]:
    usual = small_run(workspace.teacher, workspace.data, workspace.run, "--until", "distill", "--epochs", "1")
    flags: Flags = dict(zip(usual[::2], usual[1::2], strict=True)) | more
    values = [(flag, each) for flag, value in flags.items() for each in ([value] if isinstance(value, str) else value)]
    return [f"{flag}={value}" for flag, value in values]


def run(arguments: list[str]) -> int:
    """Runs the command in this process and returns its exit code; an uncaught exception is a traceback for the user."""
    before, sys.argv = sys.argv, ["pipelines.distill", *arguments]
    try:
        cli.run(distill.main)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    finally:
        sys.argv = before
    return 0


def student_hash(workspace: Workspace) -> str:
    return hash_content(folder_of(workspace, "distill") / "model")


@pytest.mark.parametrize("case", FRESH, ids=lambda case: case.name)
def test_a_broken_input_is_named_without_a_traceback(
    case: Case, pristine: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    workspace = copy_workspace(pristine, tmp_path)
    more = case.damage(workspace)
    before = {
        name: hash_content(workspace.root / name) for name in ("teacher", "data") if (workspace.root / name).is_dir()
    }
    code = run(build_arguments(workspace, more))
    output, errors = capfd.readouterr()
    printed = output + errors
    assert code == case.ends, printed
    assert "Traceback" not in printed
    if case.ends == REJECTED:
        assert errors.startswith("error: "), printed
        assert re.search(case.message, errors, re.DOTALL), printed
    else:
        assert re.search(case.message, printed, re.DOTALL), printed
    assert len(printed) < 20_000, "a message that nobody can read"
    after = {name: hash_content(workspace.root / name) for name in before}
    assert after == before, "an input was changed"


@pytest.mark.parametrize("case", broken_runs.CASES, ids=lambda case: case.name)
def test_a_damaged_run_is_named_or_rebuilt_identically(
    case: Case, finished_run: tuple[Path, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    root, student = finished_run
    workspace = copy_workspace(root, tmp_path)
    case.damage(workspace)
    code = run(build_arguments(workspace, {}))
    printed = "".join(capfd.readouterr())
    assert code in (0, 2) if case.ends == REJECTED_OR_REBUILT else code == case.ends, printed
    assert "Traceback" not in printed
    assert re.search(case.message, printed), printed
    if code == 0:
        assert student_hash(workspace) == student, "built on something unknown"
        assert all(json.loads((folder_of(workspace, stage) / "manifest.json").read_text()) for stage in STAGES)
