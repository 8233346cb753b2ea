"""Locks of compiled extensions that a killed process has left."""

import os
import time

import pytest

from pipelines.runs.strategies import extension_locks
from pipelines.runs.strategies.extension_locks import ORPHANED, clear_orphaned_locks


@pytest.fixture
def lock(tmp_path, monkeypatch):
    """A lock that was written before a build could still run."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "shm_comm").mkdir()
    file = tmp_path / "shm_comm" / "lock"
    file.touch()
    os.utime(file, (time.time() - 2 * ORPHANED,) * 2)
    return file


def test_the_lock_of_an_ended_process_is_deleted(lock):
    with pytest.warns(UserWarning, match="shm_comm"):
        clear_orphaned_locks(deletes=True)
    assert not lock.exists()


def test_the_lock_of_a_running_process_stays(lock):
    with lock.open():
        clear_orphaned_locks(deletes=True)
    assert lock.exists()


def test_a_recent_lock_is_waited_for_because_it_may_be_another_machines(lock, monkeypatch):
    now = time.time()
    os.utime(lock, (now, now))
    monkeypatch.setattr(extension_locks, "ORPHANED", 0.3)
    with pytest.warns(UserWarning, match="shm_comm"):
        clear_orphaned_locks(deletes=True)
    assert time.time() - now >= 0.3


def test_other_processes_wait_until_the_lock_is_deleted(lock, monkeypatch):
    waits = []

    def delete_later(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            lock.unlink()

    monkeypatch.setattr(extension_locks.time, "sleep", delete_later)
    clear_orphaned_locks(deletes=False)
    assert len(waits) == 3
