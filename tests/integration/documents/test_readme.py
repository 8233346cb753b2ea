"""The commands of README.md and docs/ are real: they parse, and quick ones run on toys; real/ runs all of them."""

import json
import re
import shlex
from pathlib import Path

import pytest

from pipelines import cache, distill, evaluate, export, harness, launch, plan, prune, quantize, report
from pipelines.launchers.job import read_command
from pipelines.runs.cli import parse
from pipelines.settings.commands.cache import (
    CACHE_SHORT_OPTIONS,
    InspectConfig,
    RebuildConfig,
    VerifyConfig,
    WriteConfig,
)
from pipelines.settings.commands.cascade import CascadeConfig
from pipelines.settings.commands.distill import SHORT_OPTIONS, DistillConfig
from pipelines.settings.commands.launch import check_launcher
from pipelines.settings.commands.plan import SHORT_PLANNER_OPTIONS, PlannerConfig
from real.documents import DOCUMENTS, commands_of
from support.commands import ROOT, run_to_success, small_run

TEXT = (ROOT / "README.md").read_text()
COMMANDS = commands_of(ROOT / "README.md")
CACHE = {
    "write": WriteConfig,
    "inspect": InspectConfig,
    "verify": VerifyConfig,
    "rebuild": RebuildConfig,
}
CONFIGS = {
    "pipelines.distill": (DistillConfig, SHORT_OPTIONS),
    "pipelines.prune": (DistillConfig, prune.MODEL_SHORT),
    "pipelines.quantize": (DistillConfig, quantize.QUANTIZE_SHORT),
    "pipelines.evaluate": (evaluate.EvaluateConfig, {"data": "data.path"}),
    "pipelines.export": (export.ExportConfig, {}),
    "pipelines.cascade": (CascadeConfig, {"data": "data.path"}),
    "pipelines.report": (report.ReportConfig, {"data": "data.path"}),
    "pipelines.harness": (harness.HarnessConfig, {}),
    "pipelines.plan": (PlannerConfig, SHORT_PLANNER_OPTIONS),
}


def test_the_readme_names_the_two_commands_first():
    assert [line.split() for line in COMMANDS[:2]] == [["make", "demo"], ["make", "test"]]
    makefile = (ROOT / "Makefile").read_text()
    assert "\ndemo:" in makefile
    assert "\ntest:" in makefile


WRITTEN = dict.fromkeys(line for document in DOCUMENTS for line in commands_of(document))


@pytest.mark.parametrize("line", [line for line in WRITTEN if "-m pipelines." in line and "--help" not in line])
def test_every_command_of_the_documents_is_parsed(line: str, monkeypatch):
    monkeypatch.chdir(ROOT)
    check_parsing(line)


def check_parsing(line: str) -> None:
    _, _, module, *arguments = shlex.split(line)
    if module == "pipelines.launch":
        launcher, arguments, command = launch.split_launcher(arguments)
        config = parse(launch.LaunchConfig, arguments, prog=module, about="", examples="", short={})
        check_launcher(launcher, config)
        read_command(command, config)
        check_parsing(shlex.join(command))
        return
    if module == "pipelines.cache":
        command = arguments.pop(0)
        config_class, short = CACHE[command], CACHE_SHORT_OPTIONS if command == "write" else {}
    else:
        config_class, short = CONFIGS[module]
        arguments = {"pipelines.prune": prune.with_teacher, "pipelines.quantize": quantize.with_defaults}.get(
            module, list
        )(arguments)
    assert parse(config_class, arguments, prog=module, about="", examples="", short=short)


@pytest.mark.parametrize("command", list(CACHE))
def test_every_example_of_the_caches_help_is_parsed(command):
    lines = [line for line in cache.EXAMPLES[command].splitlines() if line.strip().startswith("python -m")]
    assert lines
    for line in lines:
        if "…" not in line:
            check_parsing(line)


@pytest.mark.parametrize("module", [distill, prune, quantize, evaluate, export, report, launch, plan])
def test_every_example_of_the_help_is_parsed(module, monkeypatch):
    monkeypatch.chdir(ROOT)
    for line in module.EXAMPLES.replace("\\\n", " ").splitlines():
        check_parsing(line)


def test_the_demo_recipe_can_be_planned_on_this_checkout(tmp_path):
    message = run_to_success(
        "distill",
        ["--config", "configs/demo.yaml", "--output", str(tmp_path / "demo"), "--dry-run", "--predict", "false"],
    )
    assert "22.7M parameters" in message
    assert "3080 texts" in message


def test_hidden_states_and_labels_run_as_documented(body_folder, data_folder, tmp_path):
    flags = next(line for line in WRITTEN if "--loss.ce 0.2 --loss.hidden" in line)
    arguments = shlex.split(flags)
    options = arguments[arguments.index("--loss.ce") : arguments.index("--output")]
    run = small_run(
        body_folder, data_folder, tmp_path / "run", *options, "--epochs", "1", "--teacher_train.epochs", "1"
    )
    message = run_to_success("distill", [*run, "--until", "distill"])
    about = json.loads(next((tmp_path / "run" / "cache").rglob("cache.json")).read_text())
    assert about["signals"]["hidden"]["layers"] == [0, 2, 4], message
    assert "--cache" in run_to_success("cache", ["--help"]) + run_to_success("cache", ["verify", "--help"])
    header = next((tmp_path / "run" / "distill").rglob("metrics.csv")).read_text().splitlines()[0]
    for term in ("kl", "ce", "hidden"):
        assert f"train/{term}_gradient_share" in header
    assert "train/wait_share" in header


@pytest.mark.slow
def test_two_processes_and_early_stopping_run_as_documented(body_folder, data_folder, tmp_path):
    flags = next(line for line in WRITTEN if "--patience 2 --devices" in line)
    arguments = shlex.split(flags)
    options = arguments[arguments.index("--epochs") : arguments.index("--output")]
    run = small_run(body_folder, data_folder, tmp_path / "run", "--accelerator", "cpu", *options)
    run_to_success("distill", [*run, "--until", "distill"])
    assert list(tmp_path.glob("run/distill/*/model/model.safetensors"))


def test_the_result_table_has_scores_a_runtime_and_a_date():
    table = TEXT.split("<!-- result:begin -->")[1].split("<!-- result:end -->")[0]
    scores = [float(score) for score in re.findall(r"(\d\d\.\d\d) %", table)]
    assert len(scores) >= 2
    assert "ONNX Runtime" in table
    assert re.search(r"\d{4}-\d\d-\d\d", table), "the table says when it was measured"


def test_the_readme_has_at_most_a_thousand_words():
    assert len(TEXT.split()) <= 1000


PAGES = [*DOCUMENTS, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_to_files_and_headings(page: Path):
    for path, heading in re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]*))?\)", page.read_text()):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {path}"
        if heading:
            assert heading in anchors_of(target), f"{page.name}: {path}#{heading}"


def anchors_of(page: Path) -> set[str]:
    """The names that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
