"""Machines that write an output at a URL together, each with a copy of it."""

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from distill.errors import InputError
from pipelines.runs.console import Console
from pipelines.runs.storage.mirror import INDEX, Entry, Mirror, list_kept_files
from pipelines.runs.storage.remote import CACHE_VARIABLE, RemoteFolder
from pipelines.runs.storage.shared_mirror import SharedMirror, find_changes, merge_changes

STAGE, PARTIAL = "teacher/0123456789ab", "distill/ba9876543210.partial"
BEST, CHECKPOINTS = f"{PARTIAL}/scratch/best", f"{PARTIAL}/scratch/checkpoints"


class Machines:
    """Two machines whose calls run side by side, as those of processes do."""

    def __init__(self, url: str):
        self.store = dist.HashStore()
        self.store.set_timeout(timedelta(seconds=20))
        self.mirrors = [SharedMirror(url, Console(quiet=True), number, 2) for number in range(2)]

    def each(self, call: Callable[[SharedMirror], None]) -> None:
        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(call, mirror) for mirror in self.mirrors]:
                done.result(timeout=60)

    def pull(self) -> None:
        for mirror in self.mirrors:
            mirror.pull()

    def share(self, folder: str = "") -> None:
        self.each(lambda mirror: mirror.share(self.store, mirror.folder / folder if folder else None))

    def publish(self) -> None:
        self.each(lambda mirror: mirror.publish(self.store))

    def write(self, number: int, files: dict[str, str]) -> None:
        for path, text in files.items():
            file = self.mirrors[number].folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)

    def read(self, number: int) -> dict[str, str]:
        folder = self.mirrors[number].folder
        return {path: (folder / path).read_text() for path in list_kept_files(folder)}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))


@pytest.fixture
def url(tmp_path) -> str:
    (tmp_path / "store").mkdir()
    return f"file://{tmp_path}/store/run"


@pytest.fixture
def machines(url) -> Machines:
    machines = Machines(url)
    machines.pull()
    return machines


def read_index(tmp_path) -> dict[str, list]:
    return json.loads((tmp_path / "store/run" / INDEX).read_text())["files"]


def test_each_machine_gets_what_the_other_wrote(machines):
    machines.write(0, {f"{PARTIAL}/cache/shard-0": "a"})
    machines.write(1, {f"{PARTIAL}/cache/shard-1": "b"})
    machines.share()
    assert machines.read(0) == machines.read(1) == {f"{PARTIAL}/cache/shard-0": "a", f"{PARTIAL}/cache/shard-1": "b"}


def test_a_finished_stage_replaces_its_unfinished_folder_on_all_machines(machines, tmp_path):
    machines.write(0, {f"{PARTIAL}/model/weights": "w"})
    machines.write(1, {f"{PARTIAL}/cache/shard-1": "b"})
    machines.share()
    final = PARTIAL.removesuffix(".partial")
    folder = machines.mirrors[0].folder
    (folder / PARTIAL).rename(folder / final)
    machines.write(0, {f"{final}/manifest.json": "{}"})
    shutil.rmtree(machines.mirrors[1].folder / PARTIAL)
    machines.share()
    expected = {f"{final}/manifest.json": "{}", f"{final}/model/weights": "w", f"{final}/cache/shard-1": "b"}
    assert machines.read(0) == machines.read(1) == expected
    assert not (machines.mirrors[1].folder / PARTIAL).exists()
    assert sorted(read_index(tmp_path)) == sorted(expected)
    assert not list((tmp_path / "store/run/.stillroom/objects").iterdir())


def test_parts_of_checkpoints_stay_where_they_were_written_until_they_are_asked_for(machines, tmp_path):
    parts = {number: {f"{CHECKPOINTS}/step-4.ckpt/part-{number}": f"{number}"} for number in range(2)}
    for number, files in parts.items():
        machines.write(number, files)
        machines.write(number, {f"{BEST}/part-{number}": "best"})
    machines.publish()
    assert len(read_index(tmp_path)) == 4
    machines.share()
    for number, files in parts.items():
        assert machines.read(number) == files | {f"{BEST}/part-{number}": "best"}
    machines.share(CHECKPOINTS)
    for number in range(2):
        texts = machines.read(number)
        assert {path: text for path, text in texts.items() if "checkpoints" in path} == parts[0] | parts[1]
        assert sum("best" in path for path in texts) == 1


def test_the_index_never_has_a_part_of_a_checkpoint(machines, url, tmp_path, monkeypatch):
    """One machine is ahead of the other, and then both are lost."""
    for number in range(2):
        machines.write(number, {f"{CHECKPOINTS}/step-4.ckpt/part-{number}": f"{number}"})
    machines.publish()
    (machines.mirrors[0].folder / CHECKPOINTS / "step-4.ckpt").rename(
        machines.mirrors[0].folder / CHECKPOINTS / "step-8.ckpt"
    )
    with pytest.raises(Exception, match="(?i)no answer"):
        machines.mirrors[0].publish(Silent(machines.store))
    assert sorted(read_index(tmp_path)) == [f"{CHECKPOINTS}/step-4.ckpt/part-{number}" for number in range(2)]
    again = Machines(url)
    again.pull()
    for number in range(2):
        assert machines.read(number) == {f"{CHECKPOINTS}/step-4.ckpt/part-{number}": f"{number}" for number in range(2)}
        assert not (again.mirrors[number].folder / CHECKPOINTS / "step-8.ckpt").exists()


class Silent:
    """A store in which the other machine doesn't answer."""

    def __init__(self, store):
        self.set, self.get = store.set, store.get

    def check(self, keys: list[str]) -> bool:
        raise TimeoutError(f"no answer: {keys}")


def test_one_machine_alone_goes_on_from_what_two_wrote(machines, url, monkeypatch, tmp_path):
    for number in range(2):
        machines.write(number, {f"{CHECKPOINTS}/step-4.ckpt/part-{number}": f"{number}"})
    machines.write(0, {f"{STAGE}/manifest.json": "{}", f"{STAGE}/model": "teacher"})
    machines.share()
    machines.write(0, {f"{CHECKPOINTS}/step-8.ckpt/part-0": "lost"})
    alone = Mirror(url, Console(quiet=True))
    assert alone.folder == machines.mirrors[0].folder
    alone.pull()
    expected = {f"{CHECKPOINTS}/step-4.ckpt/part-{number}": f"{number}" for number in range(2)}
    assert machines.read(0) == expected | {f"{STAGE}/manifest.json": "{}", f"{STAGE}/model": "teacher"}


def test_nothing_is_written_if_nothing_changed(machines, monkeypatch):
    machines.write(1, {f"{STAGE}/manifest.json": "{}"})
    machines.share()
    for name in ("upload", "download", "write", "remove"):
        monkeypatch.setattr(RemoteFolder, name, None)
    machines.share()
    machines.publish()


def test_a_run_elsewhere_that_has_written_meanwhile_is_noticed(machines, url, tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "other"))
    other = Mirror(url, Console(quiet=True))
    other.pull()
    (other.folder / "stillroom.json").write_text("{}")
    other.push()
    machines.write(0, {"config.json": "{}"})
    for number in (1, 2):  # what the second machine says meanwhile
        machines.store.set(f"output/{number}/1", "{}")
    with pytest.raises(InputError, match="expected to be the only run that writes there"):
        machines.mirrors[0].share(machines.store, None)


def test_what_one_machine_removes_is_removed_on_the_others(machines, tmp_path):
    machines.write(1, {f"{STAGE}.damaged/model": "x", "config.json": "{}"})
    machines.write(1, {f"{STAGE}.damaged/manifest.json": "{}"})
    machines.share()
    shutil.rmtree(machines.mirrors[0].folder / f"{STAGE}.damaged")
    machines.share()
    assert machines.read(1) == {"config.json": "{}"}
    assert list(read_index(tmp_path)) == ["config.json"]


def test_a_file_that_two_machines_wrote_differently_is_named(machines, tmp_path):
    machines.write(0, {"config.json": "0"})
    machines.write(1, {"config.json": "1"})
    with pytest.raises(InputError, match="expected 'config.json' to be the same on all machines that wrote it"):
        machines.share()
    assert read_index(tmp_path) == {}


def test_a_file_that_two_machines_wrote_alike_is_stored_once(machines, tmp_path):
    for number in range(2):
        machines.write(number, {"stillroom.json": "{}"})
    machines.share()
    assert list(read_index(tmp_path)) == ["stillroom.json"]


def test_changes_are_merged():
    one, two, three, four, five = (Entry(size, f"{size}", f"object-{size}") for size in range(1, 6))
    before = {"same": one, "removed": two, "changed": three}
    changes = find_changes(before, {"same": one, "changed": four, "new": five})
    assert changes == {"removed": None, "changed": four, "new": five}
    merged = merge_changes(before, [{"removed": None}, {"removed": None, "new": five}])
    assert merged == {"same": one, "changed": three, "new": five}
    merged = merge_changes(before, [{"changed": four}, {"changed": None}])
    assert merged == {"same": one, "removed": two, "changed": four}
