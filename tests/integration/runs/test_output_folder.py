"""The output folder of a run: impossible paths, folders that are removed, and names that look like markup."""

import gc
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipelines import distill
from pipelines.runs.console import Console
from pipelines.runs.stage import Run
from support.commands import rejection_of, small_run, start
from support.run_inputs import write_csv
from support.tiny_models import make_rows


def below_a_file(folder: Path) -> tuple[Path, str]:
    (folder / "file.txt").write_text("mine")
    return folder / "file.txt" / "x", f"expected a folder, found a file at '{folder / 'file.txt'}'"


def dangling(folder: Path) -> tuple[Path, str]:
    (folder / "link").symlink_to(folder / "nowhere")
    return folder / "link", f"found a link to '{folder / 'nowhere'}', which doesn't exist"


def below_a_dangling_link(folder: Path) -> tuple[Path, str]:
    (folder / "link").symlink_to("nowhere")
    return folder / "link" / "x", f"found a link to 'nowhere', which doesn't exist at '{folder / 'link'}'"


def circle(folder: Path) -> tuple[Path, str]:
    (folder / "a").symlink_to("b")
    (folder / "b").symlink_to("a")
    return folder / "a", "found a link to 'b', which doesn't exist"


PLACES = {
    "below a file": below_a_file,
    "a dangling link": dangling,
    "below a dangling link": below_a_dangling_link,
    "links in a circle": circle,
    "a name too long": lambda folder: (folder / ("x" * 300), "the name is too long for this file system"),
    "a path too long": lambda folder: (
        folder / "/".join(["x" * 200] * 19),
        "the name is too long for this file system",
    ),
    "where no folder can be made": lambda folder: (Path("/proc/runs/x"), "'/proc/runs/x': "),
}


@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["", "dry"])
@pytest.mark.parametrize("case", PLACES)
def test_an_impossible_output_path_is_rejected(case, dry, tmp_path, monkeypatch, capsys):
    if dry and case.startswith("where"):
        pytest.skip("a dry run makes no folder")
    output, message = PLACES[case](tmp_path)
    before = sorted(tmp_path.rglob("*"))
    arguments = small_run(tmp_path / "teacher", tmp_path / "data", output, *dry)
    if case.startswith("where"):
        arguments = small_run(*inputs(tmp_path), output)
        before = sorted(tmp_path.rglob("*"))
    printed = rejection_of(distill, arguments, monkeypatch, capsys)
    assert message in printed
    assert f"output '{output}': " in printed
    assert sorted(tmp_path.rglob("*")) == before


def test_an_output_path_with_a_null_character_is_rejected(tmp_path, monkeypatch, capsys):
    (tmp_path / "run.yaml").write_text('output: "runs/a\\0b"\nteacher: t\ndata: d\n')
    printed = rejection_of(distill, ["--config", str(tmp_path / "run.yaml")], monkeypatch, capsys)
    assert "expected a path, found a null character in it" in printed


def test_a_link_in_place_of_the_student_folder_is_rejected_before_any_stage(tmp_path, monkeypatch, capsys):
    arguments = small_run(*inputs(tmp_path), tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "stillroom.json").write_text("{}")
    (tmp_path / "outside").mkdir()
    (tmp_path / "run" / "student").symlink_to(tmp_path / "outside")
    message = rejection_of(distill, arguments, monkeypatch, capsys)
    assert (
        f"output '{tmp_path / 'run' / 'student'}': expected a folder to publish in, or none yet, found a link"
        in message
    )
    assert not list((tmp_path / "run").glob("*/*/manifest.json"))


def inputs(folder: Path) -> tuple[Path, Path]:
    from support.run_inputs import make_inputs

    return make_inputs(folder)


@pytest.mark.parametrize("what", ["output", pytest.param("stage", marks=pytest.mark.slow)])
def test_a_folder_removed_during_its_stage_ends_the_run_with_one_message(what, body_folder, data_folder, tmp_path):
    output = tmp_path / "run"
    arguments = small_run(body_folder, data_folder, output, "--teacher_train.epochs", "200", "--until", "teacher")
    process = start("distill", arguments)
    for line in process.stdout:
        if "teacher: started" in line:
            break
    while not (partial := list((output / "teacher").glob("*.partial"))):  # created right after that line
        time.sleep(0.01)
    gone = output if what == "output" else partial[0]
    deleted = subprocess.run(["rm", "-rf", str(gone)], check=False)
    while gone.exists():  # the run may have written a file there in the meantime
        deleted = subprocess.run(["rm", "-rf", str(gone)], check=False)
    assert deleted.returncode == 0
    message, _ = process.communicate(timeout=200)
    assert process.returncode == 2, message
    assert "Traceback" not in message
    assert " was removed or renamed during the run" in message
    assert str(gone) in message


@pytest.mark.slow
def test_names_that_look_like_markup_are_printed_verbatim(body_folder, tmp_path, capsys):
    folder = tmp_path / "[red]texts[" / "x] :smile:"
    folder.mkdir(parents=True)
    teacher = body_folder.rename(folder / "[bold]teacher")
    labels = {name: f"[/{name}] :warning: [bold]" for _, name in make_rows(10, 1)}
    for split, count in (("train", 60), ("test", 20)):
        rows = [(text, labels[name]) for text, name in make_rows(count, count)]
        write_csv(folder / f"{split}.csv", rows)
    (folder / "data").mkdir()
    for split in ("train", "test"):
        (folder / f"{split}.csv").rename(folder / "data" / f"{split}.csv")
    output = folder / "[bold]run"
    arguments = small_run(teacher, folder / "data", output, "--until", "distill", "--epochs", "1")
    distill.main([*arguments, "--teacher_train.epochs", "1"])
    printed = capsys.readouterr().out
    table = printed[printed.index("Stages") :]
    assert str(output / "distill") in table.replace("\n", "")
    gc.collect()
    distill.main([*arguments, "--teacher_train.epochs", "1", "--dry-run", "--predict", "false"])
    assert str(output / "distill") in capsys.readouterr().out.replace("\n", "")


NAMES = ("[bold]", "[/x]", "[red]a[/red]", "[link=x]b", ":smile:", "\\[c]")


def test_tables_and_bars_print_names_verbatim(capsys):
    console = Console()
    console.table(NAMES[1], NAMES, [NAMES])
    with console.track(NAMES[1], 1, NAMES[0]) as advance:
        advance(1, NAMES[1])
    console.say(" ".join(NAMES))
    printed = capsys.readouterr().out
    for name in NAMES:
        assert printed.count(name) >= 3, name
    assert printed.splitlines()[0].strip() == NAMES[1]


def test_a_bar_on_a_terminal_prints_names_verbatim():
    """Uses a pseudo-terminal, because bars are drawn only on terminals."""
    pty = pytest.importorskip("pty")
    code = (
        "from pipelines.runs.console import Console\n"
        "with Console().track('[/x] :smile:', 2, '[bold]') as advance:\n"
        "    advance(2, '[/y]')\n"
    )
    parent, child = pty.openpty()
    env = os.environ | {"TERM": "xterm", "COLUMNS": "160"}
    done = subprocess.run([sys.executable, "-c", code], stdout=child, stderr=subprocess.PIPE, env=env, text=True)
    os.close(child)
    printed = os.read(parent, 100_000).decode()
    os.close(parent)
    assert done.returncode == 0, done.stderr
    for name in ("[/x] :smile:", "[bold]/s", "[/y]"):
        assert name in printed


def test_a_run_in_a_checkout_that_is_not_installed_states_that(tmp_path, monkeypatch):
    real = importlib.metadata.distribution

    def hide_stillroom(name: str) -> importlib.metadata.Distribution:
        if name == "stillroom":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "distribution", hide_stillroom)
    run = Run(tmp_path / "run", 0, Console(quiet=True))
    built = run.stage("data", {}, {}, lambda folder: {}, version=1)
    assert json.loads((tmp_path / "run" / "stillroom.json").read_text())["stillroom"] == "checkout"
    assert built.manifest["versions"]["stillroom"] == "checkout"
    assert built.manifest["versions"]["torch"] == importlib.metadata.version("torch")
