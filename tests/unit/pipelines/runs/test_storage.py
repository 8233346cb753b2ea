"""Copies of folders at URLs, and outputs that are kept at one."""

import json
import threading
import time
from pathlib import Path

import pytest

from distill.errors import InputError
from pipelines.runs.console import Console
from pipelines.runs.storage import mirror as mirrors
from pipelines.runs.storage.fetch import fetch
from pipelines.runs.storage.mirror import INDEX, Mirror, is_needed, list_kept_files
from pipelines.runs.storage.remote import CACHE_VARIABLE, RemoteFolder, check_inside
from pipelines.settings.places import is_url

STAGE, PARTIAL = "teacher/0123456789ab", "distill/ba9876543210.partial"
CHECKPOINT = f"{PARTIAL}/scratch/checkpoints/step-000000004.ckpt"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def url(tmp_path) -> str:
    (tmp_path / "store").mkdir()
    return f"file://{tmp_path}/store/run"


def write(folder: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def read(folder: Path) -> dict[str, str]:
    return {path: (folder / path).read_text() for path in list_kept_files(folder)}


def push_files(url: str) -> Mirror:
    """Returns an output with `FILES`, which was pushed."""
    first = Mirror(url, Console(quiet=True))
    first.pull()
    write(first.folder, FILES)
    first.push()
    return first


def other_machine(monkeypatch, tmp_path: Path, url: str) -> Mirror:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "other"))
    return Mirror(url, Console(quiet=True))


FILES = {
    "stillroom.json": "{}",
    f"{STAGE}/manifest.json": '{"digest": 1}',
    f"{STAGE}/model/model.safetensors": "weights",
    f"{CHECKPOINT}/training.pt": "step 4",
    "student/model.safetensors": "published",
    "config.json": "settings",
}


def test_another_machine_gets_stages_and_checkpoints(url, tmp_path, monkeypatch):
    push_files(url)
    second = other_machine(monkeypatch, tmp_path, url)
    second.pull()
    assert read(second.folder) == {path: text for path, text in FILES.items() if not path.startswith("student")}


def test_finished_files_have_their_names_in_the_store(url, tmp_path):
    push_files(url)
    store = tmp_path / "store/run"
    stored = {str(path.relative_to(store)) for path in store.rglob("*") if path.is_file()}
    assert {f"{STAGE}/model/model.safetensors", "student/model.safetensors", "config.json", INDEX} <= stored
    assert not any(path.startswith(PARTIAL) for path in stored)


def test_an_unchanged_output_is_neither_read_nor_written_again(url, monkeypatch):
    first = push_files(url)
    for name in ("upload", "download", "write"):
        monkeypatch.setattr(RemoteFolder, name, None)
    first.push()
    again = Mirror(url, Console(quiet=True))
    again.pull()
    assert read(again.folder) == FILES


def test_files_removed_locally_are_removed_from_the_store(url, tmp_path):
    first = push_files(url)
    (first.folder / CHECKPOINT / "training.pt").unlink()
    write(first.folder, {f"{CHECKPOINT.replace('04', '08')}/training.pt": "step 8"})
    first.push()
    (first.folder / "config.json").unlink()
    first.push()
    objects = [path.read_text() for path in (tmp_path / "store/run/.stillroom/objects").iterdir()]
    assert sorted(objects) == ["step 8", FILES["stillroom.json"]]
    assert not (tmp_path / "store/run/config.json").exists()


def test_a_push_that_is_killed_leaves_the_earlier_state(url, tmp_path, monkeypatch):
    first = push_files(url)
    changed = {f"{CHECKPOINT}/training.pt": "half written", f"{STAGE}x/manifest.json": "{}", "config.json": "others"}
    write(first.folder, changed)
    monkeypatch.setattr(first, "_write_index", lambda entries: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        first.push()
    second = other_machine(monkeypatch, tmp_path, url)
    second.pull()
    assert (second.folder / CHECKPOINT / "training.pt").read_text() == "step 4"
    assert (second.folder / "config.json").read_text() == "settings"
    assert not (second.folder / f"{STAGE}x").exists()


def test_a_changed_object_is_named(url, tmp_path, monkeypatch):
    push_files(url)
    (tmp_path / "store/run" / STAGE / "model/model.safetensors").write_text("WEIGHTS")
    second = other_machine(monkeypatch, tmp_path, url)
    with pytest.raises(InputError, match=rf"output '{url}/{STAGE}/model/model.safetensors': expected SHA-256 .* found"):
        second.pull()
    assert not (second.folder / STAGE / "model/model.safetensors").exists()


def test_a_damaged_index_is_named(url, tmp_path, monkeypatch):
    push_files(url)
    index = tmp_path / "store/run" / INDEX
    for content in (index.read_text()[:-9], "[]", '{"serial": "a", "files": {"x": [1]}}'):
        index.write_text(content)
        with pytest.raises(
            InputError, match=rf"output '{url}/{INDEX}': expected an index .* found {len(content)} bytes"
        ):
            other_machine(monkeypatch, tmp_path, url).pull()


def test_readers_never_see_a_half_written_object(tmp_path):
    remote = RemoteFolder(f"file://{tmp_path}", "output")
    contents = {size: bytes([size % 256]) * size for size in (2**20, 2**21)}
    is_over = threading.Event()

    def write_in_turn() -> None:
        while not is_over.is_set():
            for content in contents.values():
                remote.write("object", content)

    remote.write("object", contents[2**20])
    writer = threading.Thread(target=write_in_turn)
    writer.start()
    reads = [remote.read("object") for _ in range(50)]
    is_over.set()
    writer.join()
    assert set(reads) <= set(contents.values())


def test_a_second_writer_is_noticed(url, tmp_path, monkeypatch):
    first = push_files(url)
    second = other_machine(monkeypatch, tmp_path, url)
    second.pull()
    write(second.folder, {"stillroom.json": "[]"})
    second.push()
    write(first.folder, {"stillroom.json": "[1]"})
    with pytest.raises(InputError, match="another one has since; what was made here is in"):
        first.push()


def test_checkpoints_are_pushed_while_the_block_runs(url, tmp_path, monkeypatch):
    monkeypatch.setattr(mirrors, "LOOK_SECONDS", 0.05)
    first = Mirror(url, Console(quiet=True))
    first.pull()
    with first.keep_pushed():
        write(first.folder, {f"{CHECKPOINT}/training.pt": "step 4"})
        until, index = time.monotonic() + 10, {"files": {}}
        while not index["files"] and time.monotonic() < until:
            time.sleep(0.05)
            index = json.loads((tmp_path / "store/run" / INDEX).read_text())
        write(first.folder, {"stillroom.json": "{}"})
    assert list(index["files"]) == [f"{CHECKPOINT}/training.pt"]
    assert (tmp_path / "store/run/stillroom.json").exists()


def test_files_that_are_being_written_are_left_out(tmp_path):
    write(tmp_path, {f"{CHECKPOINT.replace('.ckpt', '.partial')}/a": "", "x.json.partial": "", ".lock": "", "b/c": ""})
    assert list(list_kept_files(tmp_path)) == ["b/c"]
    assert not is_needed("student/onnx/model.onnx", {})


def test_a_copy_follows_what_is_at_the_url(tmp_path):
    source = tmp_path / "texts"
    write(source, {"train.csv": "text,label\na,b\n", "old.csv": "x"})
    copy = fetch(f"file://{source}", "data.path")
    assert copy.name == "texts"
    assert read(copy) == {"train.csv": "text,label\na,b\n", "old.csv": "x"}
    write(source, {"train.csv": "text,label\nc,d\ne,f\n"})
    (source / "old.csv").unlink()
    assert read(fetch(f"file://{source}", "data.path")) == {"train.csv": "text,label\nc,d\ne,f\n"}
    file = fetch(f"file://{source}/train.csv", "data.path")
    assert file.name == "train.csv"
    assert file.read_text() == "text,label\nc,d\ne,f\n"


def test_an_unchanged_copy_is_not_read_again(tmp_path, monkeypatch):
    write(tmp_path / "texts", {"train.csv": "text"})
    fetch(f"file://{tmp_path}/texts", "data.path")
    monkeypatch.setattr(RemoteFolder, "download", None)
    fetch(f"file://{tmp_path}/texts", "data.path")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("file:///no/such/folder", r"data.path 'file:///no/such/folder': expected a folder or a file, found nothing"),
        ("nonsense://x/y", r"data.path 'nonsense://x/y': expected a path, or a URL such as s3://bucket/folder"),
    ],
)
def test_a_url_without_anything_is_rejected(url, message):
    with pytest.raises(InputError, match=message):
        fetch(url, "data.path")


def test_paths_that_leave_their_folder_are_rejected():
    check_inside(["a/b", "..c"])
    for path in ("../b", "a/../../b", "/etc/passwd"):
        with pytest.raises(InputError, match="expected a path within its folder"):
            check_inside([path])


def test_paths_and_model_names_are_not_urls():
    assert is_url("s3://bucket/x")
    assert not any(map(is_url, ["runs/x", "/runs/x", "org/model", "package:a/b", "C:/x"]))


def test_a_checkpoint_that_is_replaced_meanwhile_is_pushed_as_it_was(url, tmp_path, monkeypatch):
    first = Mirror(url, Console(quiet=True))
    first.pull()
    write(first.folder, FILES)
    upload = RemoteFolder.upload

    def replace_first(self, file, path):
        (first.folder / CHECKPOINT / "training.pt").unlink(missing_ok=True)
        (first.folder / "stillroom.json").write_text("{changed}")
        upload(self, file, path)

    monkeypatch.setattr(RemoteFolder, "upload", replace_first)
    first.push()
    second = other_machine(monkeypatch, tmp_path, url)
    second.pull()
    assert (second.folder / CHECKPOINT / "training.pt").read_text() == "step 4"
    assert (second.folder / "stillroom.json").read_text() == "{}"
