"""Folders and files are written completely or not at all, also if the process is killed in between."""

from pathlib import Path

import pytest

from pipelines.runs.files import recover_folder, replace_folder, write_json


class Killed(BaseException):
    """Simulates a kill."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the content `old`."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "content").write_text("old")
    return folder


def replace(folder: Path, content: str) -> None:
    with replace_folder(folder) as fresh:
        (fresh / "content").write_text(content)


def content(folder: Path) -> str:
    return (folder / "content").read_text()


def killed_at_rename(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the rename with this number fail like a kill."""
    real, calls = Path.rename, iter(range(1, 10))

    def rename(self: Path, target: Path) -> Path:
        if next(calls) == number:
            raise Killed
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)


def test_a_folder_is_replaced_by_the_new_one(folder: Path):
    replace(folder, "new")
    assert content(folder) == "new"
    assert [each.name for each in folder.parent.iterdir()] == [folder.name]


def test_an_error_in_the_block_keeps_the_old_folder(folder: Path):
    with pytest.raises(TypeError), replace_folder(folder) as fresh:
        (fresh / "content").write_text(1)
    assert content(folder) == "old"


@pytest.mark.parametrize("number", [1, 2])
def test_a_folder_is_complete_after_a_kill_at_either_rename(number: int, folder: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        killed_at_rename(number, patch)
        with pytest.raises(Killed):
            replace(folder, "new")
    recover_folder(folder)
    assert content(folder) == "old"
    replace(folder, "newer")
    assert content(folder) == "newer"
    assert [each.name for each in folder.parent.iterdir()] == [folder.name]


def test_a_replacement_that_fails_after_a_kill_restores_the_old_folder(folder: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        killed_at_rename(2, patch)
        with pytest.raises(Killed):
            replace(folder, "new")
    with pytest.raises(ValueError, match="broken"), replace_folder(folder):
        raise ValueError("broken")
    assert content(folder) == "old"


def test_recovering_an_intact_folder_changes_nothing(folder: Path):
    recover_folder(folder)
    assert content(folder) == "old"
    recover_folder(folder.parent / "missing")
    assert not (folder.parent / "missing").exists()


def test_a_json_file_that_fails_to_be_written_keeps_its_old_content(tmp_path: Path):
    write_json(tmp_path / "file.json", {"a": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / "file.json", {("not", "a", "key"): 1})
    assert (tmp_path / "file.json").read_text() == '{\n "a": 1\n}'
