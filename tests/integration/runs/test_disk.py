"""A full disk and an unwritable folder end a run with one message, without losing complete stages."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.commands import run_to_success, small_run, start

QUICK = ("--epochs", "1", "--teacher_train.epochs", "1")


@pytest.fixture
def mount_disk(tmp_path: Path) -> Iterator:
    """`mount_disk(options)` mounts a small separate file system at tmp_path/"disk" and returns the folder."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(options: str) -> Path:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"a file system of its own needs the right to mount: {done.stderr.strip()}")
        return folder

    yield mount
    subprocess.run(["umount", str(folder)], capture_output=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(("kilobytes", "until"), [(60, "distill"), (900, "report")])
def test_a_full_disk_ends_with_one_message_and_the_run_resumes_with_more_space(
    kilobytes, until, mount_disk, body_folder, data_folder
):
    disk = mount_disk(f"size={kilobytes}k")
    arguments = small_run(body_folder, data_folder, disk / "run", *QUICK, "--until", until)
    process = start("distill", arguments)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 2, output
    assert "the disk is full" in output
    assert "Traceback" not in output
    before = {file: file.read_bytes() for file in disk.glob("run/*/*/manifest.json")}
    subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
    run_to_success("distill", arguments)
    assert {file: file.read_bytes() for file in before} == before
    assert list(disk.glob("run/distill/*/model/model.safetensors"))


def test_a_read_only_folder_ends_with_one_message(mount_disk, body_folder, data_folder):
    disk = mount_disk("size=1m")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    process = start("distill", small_run(body_folder, data_folder, disk / "run", *QUICK))
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 2, output
    assert "no permission to write there" in output
    assert "Traceback" not in output


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_ends_with_one_message(tmp_path, body_folder, data_folder):
    read_only = tmp_path / "closed"
    read_only.mkdir(mode=0o555)
    process = start("distill", small_run(body_folder, data_folder, read_only / "run", *QUICK))
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 2, output
    assert "no permission to write there" in output
