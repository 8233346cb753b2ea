"""Manifests of finished stages: damage is named or repaired, and files that they don't list are rejected."""

import ast
import gc
import json
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest

from pipelines import distill
from pipelines.runs.manifest import hash_json
from pipelines.stages.prepare import data
from support.commands import ROOT, rejection_of, small_run
from support.run_inputs import stage_folder, write_csv
from support.tiny_models import build_model, make_rows, saved, word_tokenizer


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """(output, arguments) of a run with two stages: data, and a teacher that is used without fine-tuning."""
    folder = tmp_path_factory.mktemp("stages")
    tokenizer = word_tokenizer()
    teacher = saved(build_model("bert"), tokenizer, folder / "teacher")
    (folder / "data").mkdir()
    for split, count in (("train", 60), ("test", 20)):
        write_csv(folder / "data" / f"{split}.csv", make_rows(count, count))
    arguments = small_run(teacher, folder / "data", folder / "run", "--until", "teacher")
    distill.main(arguments)
    return folder / "run", arguments


@pytest.fixture
def copied_run(finished_run, tmp_path: Path) -> tuple[Path, list[str]]:
    """A copy of that run that a test may damage."""
    output, arguments = finished_run
    copy = shutil.copytree(output, tmp_path / "copy")
    return copy, [str(copy) if word == str(output) else word for word in arguments]


def read_contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def edit_manifest(change):
    """Returns a function that loads the manifest, applies `change` and writes the manifest back."""

    def damage(file: Path) -> None:
        content = json.loads(file.read_text())
        change(content)
        file.write_text(json.dumps(content))

    return damage


def rename_output(name: str):
    def change(content: dict) -> None:
        content["outputs"][name] = content["outputs"].pop("data.json")

    return edit_manifest(change)


def rewrite_with_hash(file: Path) -> None:
    """Changes a file and its hash in the manifest, but not the digest that later stages depend on."""
    content = json.loads(file.read_text())
    labels = file.with_name("data.json")
    labels.write_text(labels.read_text() + " ")
    content["outputs"]["data.json"]["sha256"] = hash_json("anything")
    file.write_text(json.dumps(content))


DAMAGE = {
    "empty": (lambda file: file.write_bytes(b""), "that is empty"),
    "cut off": (lambda file: file.write_bytes(file.read_bytes()[:-40]), "is truncated or isn't JSON"),
    "no JSON": (lambda file: file.write_text("years of work"), "is truncated or isn't JSON"),
    "no text": (lambda file: file.write_bytes(bytes(range(128, 256))), "is truncated or isn't JSON"),
    "too deep": (lambda file: file.write_text("[" * 100_000), "is truncated or isn't JSON"),
    "a list": (lambda file: file.write_text("[1, 2]"), "expected an object, found list"),
    "no keys": (lambda file: file.write_text("{}"), "that was changed"),
    "gone": (lambda file: file.unlink(), "has no manifest.json"),
    "a folder": (lambda file: (file.unlink(), file.mkdir()), "has no manifest.json"),
    "a link": (lambda file: (file.rename(file.with_name("x")), file.symlink_to("x")), "has no manifest.json"),
    "outputs are a list": (edit_manifest(lambda content: content.update(outputs=[1])), "that was changed"),
    "no outputs": (edit_manifest(lambda content: content.pop("outputs")), "that was changed"),
    "no metrics": (edit_manifest(lambda content: content.pop("metrics")), "that was changed"),
    "another digest": (edit_manifest(lambda content: content.update(digest="0" * 64)), "that was changed"),
    "a digest that is a number": (edit_manifest(lambda content: content.update(digest=7)), "that was changed"),
    "seconds as words": (edit_manifest(lambda content: content.update(wall_seconds="long")), "that was changed"),
    "an absolute path": (rename_output("/etc/passwd"), "that was changed"),
    "a path that leads out": (rename_output("../../../elsewhere.json"), "that was changed"),
    "a file and its hash, but not the digest": (rewrite_with_hash, "that was changed"),
}


QUICK = ("empty", "a list", "gone", "a link", "another digest")


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in DAMAGE]
)
def test_a_stage_with_a_damaged_manifest_is_set_aside_and_rebuilt(case, copied_run, capsys):
    output, arguments = copied_run
    folder = stage_folder(output, "data")
    whole = read_contents(folder)
    digest = json.loads(whole["manifest.json"])["digest"]
    damage, message = DAMAGE[case]
    damage(folder / "manifest.json")
    damaged = read_contents(folder)
    distill.main(arguments)
    printed = capsys.readouterr().out
    assert f"data: '{folder}' " in printed
    assert message in printed
    assert "so the stage is rebuilt; the old folder is now" in printed
    assert "teacher: already complete, skipped" in printed
    assert read_contents(folder.with_name(f"{folder.name}.damaged-1")) == damaged
    again = read_contents(folder)
    assert json.loads(again["manifest.json"])["digest"] == digest
    assert {name for name in again if name != "manifest.json"} == {name for name in whole if name != "manifest.json"}


def test_a_stage_damaged_a_second_time_is_set_aside_beside_the_first(copied_run, capsys):
    output, arguments = copied_run
    folder = stage_folder(output, "data")
    for _ in range(2):
        (folder / "manifest.json").write_text("")
        distill.main(arguments)
    assert sorted(each.name for each in folder.parent.iterdir()) == [
        *(folder.name, f"{folder.name}.damaged-1", f"{folder.name}.damaged-2")
    ]


def test_a_dry_run_names_a_damaged_manifest_and_changes_nothing(copied_run, capsys):
    output, arguments = copied_run
    folder = stage_folder(output, "data")
    (folder / "manifest.json").write_text("")
    before = read_contents(output)
    distill.main([*arguments, "--dry-run", "--predict", "false"])
    assert "will be rebuilt: it has a manifest.json that is empty" in capsys.readouterr().out
    assert read_contents(output) == before


@pytest.mark.parametrize(
    "name",
    [
        "notes.txt",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("model/more.txt", "logs/mine.csv", "model/linked")),
    ],
)
def test_a_file_added_to_a_finished_stage_is_named(name, copied_run, monkeypatch, capsys):
    output, arguments = copied_run
    folder = stage_folder(output, "teacher")
    (folder / name).parent.mkdir(exist_ok=True)
    if name.endswith("linked"):
        (folder / name).symlink_to(folder.parent)
    else:
        (folder / name).write_text("mine")
    message = rejection_of(distill, arguments, monkeypatch, capsys)
    assert f"stage '{folder}': {name} was added since the stage ended" in message
    (folder / name).unlink()
    gc.collect()  # the raised exception still holds the lock of the folder
    distill.main(arguments)
    assert "teacher: already complete, skipped" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["a file", "a folder"])
def test_a_link_that_leaves_the_stage_folder_is_rejected(what, copied_run, tmp_path, monkeypatch, capsys):
    output, arguments = copied_run
    inside = stage_folder(output, "teacher") / ("model/config.json" if what == "a file" else "model")
    outside = tmp_path / "outside"
    inside.rename(outside)
    inside.symlink_to(outside)
    message = rejection_of(distill, arguments, monkeypatch, capsys)
    assert f"links to '{tmp_path / 'outside'}" in message


def test_a_partial_stage_with_a_damaged_manifest_is_resumed(copied_run, capsys):
    output, arguments = copied_run
    folder = stage_folder(output, "data")
    partial = folder.rename(folder.with_name(f"{folder.name}.partial"))
    (partial / "manifest.json").write_text("{")
    (partial / "manifest.json.partial").write_text("{")
    distill.main(arguments)
    printed = capsys.readouterr().out
    assert "data: resuming" in printed
    assert "teacher: already complete, skipped" in printed
    distill.main(arguments)
    assert "data: already complete, skipped" in capsys.readouterr().out


def test_a_file_in_place_of_a_stage_folder_is_named_and_kept(copied_run, monkeypatch, capsys):
    output, arguments = copied_run
    shutil.rmtree(output / "teacher")
    (output / "teacher").write_text("mine")
    assert f"found a file or a broken link at '{output / 'teacher'}" in rejection_of(
        distill, arguments, monkeypatch, capsys
    )
    assert (output / "teacher").read_text() == "mine"


def test_a_stage_with_a_raised_version_is_rebuilt_beside_the_old_one(copied_run, monkeypatch, capsys):
    output, arguments = copied_run
    old = stage_folder(output, "data")
    before = read_contents(old)
    monkeypatch.setattr(data, "VERSION", data.VERSION + 1)
    distill.main(arguments)
    assert "data: started" in capsys.readouterr().out
    assert read_contents(old) == before
    versions = [json.loads(file.read_text())["version"] for file in (output / "data").glob("*/manifest.json")]
    assert sorted(versions) == [data.VERSION - 1, data.VERSION]


def test_a_raised_training_version_changes_the_key(monkeypatch):
    from distill.train.config import TrainConfig
    from pipelines.stages.prepare import teacher

    before = teacher.select_key_settings(TrainConfig())
    monkeypatch.setattr(teacher, "TRAINING", teacher.TRAINING + 1)
    assert teacher.select_key_settings(TrainConfig()) != before


def test_every_stage_passes_a_version_constant():
    calls = [
        (file.name, keyword.value)
        for file in sorted((ROOT / "pipelines").rglob("*.py"))
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "stage"
        if ast.unparse(call.func.value) != "super()"  # passes on what its caller gave
        for keyword in [next((each for each in call.keywords if each.arg == "version"), ast.keyword(value=None))]
    ]
    assert len(calls) >= 18
    assert not [file for file, value in calls if not (isinstance(value, ast.Name) and value.id.endswith("VERSION"))]


def test_a_manifest_contains_the_versions_of_stillroom_and_of_its_stage(finished_run):
    output, _ = finished_run
    manifest = json.loads((stage_folder(output, "data") / "manifest.json").read_text())
    assert manifest["versions"]["stillroom"] == version("stillroom")
    assert manifest["version"] == data.VERSION


def test_stages_of_an_older_stillroom_are_kept_and_rebuilt_beside_them(copied_run, capsys):
    output, arguments = copied_run
    folder = stage_folder(output, "data")
    old = folder.rename(folder.with_name("0123456789ab"))  # like older releases' keys, which exclude the version
    manifest = json.loads((old / "manifest.json").read_text())
    older_manifest = {name: value for name, value in manifest.items() if name not in ("version", "checksum")}
    (old / "manifest.json").write_text(json.dumps(older_manifest))
    (output / "stillroom.json").write_text('{"stillroom": "0.1.0"}')
    before = read_contents(old)
    distill.main(arguments)
    printed = capsys.readouterr().out
    assert f"output '{output}': an older Stillroom built its stages" in printed
    assert "data: started" in printed
    assert read_contents(old) == before
    distill.main(arguments)
    assert "older Stillroom" not in capsys.readouterr().out
