"""Publication of a run: the user's own files stay, links are not followed, and the last run is published."""

import gc
import json
import shutil
from pathlib import Path

import pytest

from pipelines import report
from pipelines.runs.manifest import hash_file
from pipelines.settings.command_line import override_flags
from support.commands import QUICK_MEASUREMENT, rejection_of
from support.run_inputs import make_inputs
from support.tiny_models import build_model, saved, word_tokenizer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """(output, arguments) of a checkpoint's report, which publishes like a full run in a tenth of the time."""
    folder = tmp_path_factory.mktemp("published")
    _, data = make_inputs(folder)
    tokenizer = word_tokenizer()
    model = saved(build_model("bert", num_hidden_layers=1), tokenizer, folder / "model")
    arguments = ["--model", str(model), "--data", str(data), "--output", str(folder / "run"), *QUICK_MEASUREMENT]
    report.main(arguments)
    gc.collect()
    return folder / "run", arguments


@pytest.fixture
def copied_run(finished_run, tmp_path: Path) -> tuple[Path, list[str]]:
    output, arguments = finished_run
    copy = shutil.copytree(output, tmp_path / "copy", symlinks=True)
    return copy, [str(copy) if word == str(output) else word for word in arguments]


def list_names(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file() or file.is_symlink()}


def test_the_users_own_files_stay_when_the_run_is_published_again(copied_run, capsys):
    output, arguments = copied_run
    student = output / "student"
    published = list_names(student)
    (student / "notes.txt").write_text("years of work")
    (student / "onnx" / "mine").mkdir()
    (student / "onnx" / "mine" / "measured.csv").write_text("1,2")
    (student / "README.md").write_text("# Our own card")
    shutil.copy(student / "model.safetensors", student / "before.safetensors")
    weights = (student / "model.safetensors").read_bytes()
    for again in range(2):
        report.main(arguments)
        gc.collect()
        printed = capsys.readouterr().out
        assert (student / "notes.txt").read_text() == "years of work"
        assert (student / "onnx/mine/measured.csv").read_text() == "1,2"
        assert (student / "README.md.yours").read_text() == "# Our own card"
        assert "library_name: transformers" in (student / "README.md").read_text()
        assert (student / "before.safetensors").read_bytes() == weights
        user_files = {"notes.txt", "onnx/mine/measured.csv", "README.md.yours", "before.safetensors"}
        assert list_names(student) == published | user_files, again
        assert "student: 4 files of your own are kept" in printed
    assert not [each for each in output.iterdir() if each.name.startswith(".student")]


def test_files_that_are_no_longer_published_are_removed(copied_run, capsys):
    output, arguments = copied_run
    stale = output / "student" / "old-format" / "model.bin"
    stale.parent.mkdir()
    stale.write_bytes(b"an older run's")
    record = json.loads((output / "published.json").read_text())
    record["student/old-format/model.bin"] = [hash_file(stale)]
    (output / "published.json").write_text(json.dumps(record))
    report.main(arguments)
    assert not stale.parent.exists()
    assert "files of your own" not in capsys.readouterr().out


@pytest.mark.parametrize("damage", ["gone", "no JSON", "another shape"])
def test_the_users_files_stay_without_a_publication_record(damage, copied_run):
    output, arguments = copied_run
    record = output / "published.json"
    content = {"no JSON": "{", "another shape": '[{"student": 1}]'}
    record.unlink() if damage == "gone" else record.write_text(content[damage])
    (output / "student" / "notes.txt").write_text("mine")
    report.main(arguments)
    assert (output / "student" / "notes.txt").read_text() == "mine"


def test_links_in_the_student_folder_stay_and_are_not_followed(copied_run, tmp_path):
    output, arguments = copied_run
    student, outside = output / "student", tmp_path / "outside"
    outside.mkdir()
    (outside / "thesis.txt").write_text("years of work")
    (student / "linked").symlink_to(outside)
    (student / "link.txt").symlink_to(outside / "thesis.txt")
    (student / "config.json").unlink()
    (student / "config.json").symlink_to(outside / "thesis.txt")
    shutil.rmtree(student / "onnx")
    (student / "onnx").symlink_to(outside)
    report.main(arguments)
    assert {file.name: file.read_text() for file in outside.iterdir()} == {"thesis.txt": "years of work"}
    for name, target in (("linked", ""), ("onnx.yours", ""), ("link.txt", "thesis.txt")):
        assert (student / name).readlink() == outside / target
    assert (student / "config.json.yours").readlink() == outside / "thesis.txt"
    assert json.loads((student / "config.json").read_text())["model_type"] == "bert"
    assert (student / "onnx" / "model.onnx").is_file()
    assert not (student / "onnx").is_symlink()


@pytest.mark.parametrize("what", ["a link", "a broken link", "a file"])
def test_a_link_or_file_in_place_of_the_student_folder_is_rejected(what, copied_run, tmp_path, monkeypatch, capsys):
    output, arguments = copied_run
    student, outside = output / "student", tmp_path / "outside"
    moved = student.rename(tmp_path / "moved")
    if what == "a file":
        student.write_text("mine")
    else:
        student.symlink_to(moved if what == "a link" else outside)
    before = list_names(moved)
    gc.collect()
    message = rejection_of(report, arguments, monkeypatch, capsys)
    assert f"output '{student}': expected a folder to publish in, or none yet, found {what.split()[0]} " in message
    assert list_names(moved) == before
    assert not outside.exists()
    assert student.is_symlink() or student.read_text() == "mine"


def test_a_kill_between_the_two_renames_loses_no_files(copied_run):
    output, arguments = copied_run
    (output / "student" / "notes.txt").write_text("mine")
    (output / "student").rename(output / ".student.old")
    (output / ".student.new").mkdir()
    report.main(arguments)
    assert (output / "student" / "notes.txt").read_text() == "mine"
    assert (output / "student" / "model.safetensors").is_file()
    assert not (output / ".student.old").exists()


def test_the_report_is_redrawn_with_the_settings_of_the_last_run(copied_run, capsys):
    output, arguments = copied_run
    report.main(arguments)
    gc.collect()
    first = (output / "report.json").read_bytes()
    report.main(override_flags((), [*arguments, "--measure.rounds", "2"], {}))
    assert len(list((output / "report").glob("*/report.json"))) == 3, "one of the run that was copied"
    gc.collect()
    report.main(arguments)
    assert (output / "report.json").read_bytes() == first
    page = (output / "report.html").read_text()
    capsys.readouterr()
    report.main(["--run", str(output)])
    assert (output / "report.html").read_text() == page
    assert "report.html" in capsys.readouterr().out


@pytest.mark.parametrize("damage", ["gone", "changed", "its stage is gone", "its curves are cut off"])
def test_a_damaged_report_is_rejected_by_name(damage, copied_run, monkeypatch, capsys):
    output, _ = copied_run
    (stage,) = (output / "report").glob("*/report.json")
    if damage == "gone":
        (output / "report.json").unlink()
    elif damage == "changed":
        (output / "report.json").write_text("{")
    elif damage == "its stage is gone":
        shutil.rmtree(stage.parent)
    else:
        (stage.parent / "curves.json").write_text('{"teacher"')
    page = (output / "report.html").read_bytes()
    message = rejection_of(report, ["--run", str(output)], monkeypatch, capsys)
    wanted = {"gone": "no finished report there", "its curves are cut off": "expected what the report stage wrote"}
    assert wanted.get(damage, "expected report.json as a run wrote it, found another") in message
    assert (output / "report.html").read_bytes() == page


def test_charts_are_not_written_through_a_link(copied_run, tmp_path, monkeypatch, capsys):
    output, _ = copied_run
    (tmp_path / "outside").mkdir()
    (output / "charts").symlink_to(tmp_path / "outside")
    assert "found a link to" in rejection_of(report, ["--run", str(output), "--charts", "true"], monkeypatch, capsys)
    assert not list((tmp_path / "outside").iterdir())
