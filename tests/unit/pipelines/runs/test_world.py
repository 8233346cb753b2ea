"""Tests how the processes of a run exchange values, wait for one another and check that they agree."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distill.errors import InputError
from pipelines.runs.failure_reports import explain_failures
from pipelines.runs.processes import World, agree_on_name
from support.processes.ranks import run_ranks


def world_in(folder: Path, rank: int, processes: int) -> World:
    return World(rank, processes, dist.FileStore(str(folder / "store"), processes))


def exchange_values(rank: int, folder: Path) -> tuple[list, list]:
    world = world_in(folder, rank, 3)
    expected = [world.broadcast({"step": n} if rank == 0 else None) for n in range(3)]
    if rank == 1:
        time.sleep(0.5)
        (folder / "last").touch()
    world.barrier()
    assert (folder / "last").exists(), "it went on before the last had come"
    return expected, world.gather(rank * 10)


def test_processes_share_values_and_wait_for_each_other(tmp_path):
    for received, gathered in run_ranks(exchange_values, 3, tmp_path):
        assert received == [{"step": 0}, {"step": 1}, {"step": 2}]
        assert gathered == [0, 10, 20]


def disagree(rank: int, folder: Path, name: str) -> str:
    world = world_in(folder, rank, 2)
    facts = {"seed": 0, "data": "abc", "settings": {"epochs": 3}}
    if rank == 1:
        facts[name] = {"seed": 1, "data": "abd", "settings": {"epochs": 4}}[name]
    with pytest.raises(InputError) as rejected:
        world.check_agreement(facts)
    return str(rejected.value)


@pytest.mark.parametrize("name", ["seed", "data", "settings"])
def test_processes_that_disagree_fail_and_name_the_differing_fact(name, tmp_path):
    for message in run_ranks(disagree, 2, tmp_path, name):
        assert message.startswith(f"process 1 of 2: expected {name} to be ")


def check_shared_folder(rank: int, folder: Path, places: tuple[str, str]) -> str | None:
    world = world_in(folder, rank, 2)
    try:
        world.check_folder(folder / places[rank])
    except InputError as error:
        return str(error)
    return None


def test_processes_that_share_a_folder_pass_the_check_and_leave_no_files(tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    assert run_ranks(check_shared_folder, 2, tmp_path, ("here", "here")) == [None, None]
    assert not list((tmp_path / "here").iterdir())


def test_processes_with_different_folders_fail_the_check(tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    messages = run_ranks(check_shared_folder, 2, tmp_path, ("here", "there"))
    assert all(message is not None and "process 1 doesn't see the folder" in message for message in messages)


def wait_in_collective(rank: int, folder: Path) -> str | None:
    world, group = world_in(folder, rank, 2), dist.new_group(timeout=timedelta(seconds=2))
    world.record_position("validation after epoch 2" if rank else "epoch 3, batch 1")
    world.barrier()
    if rank == 1:
        time.sleep(4)
        return None
    with pytest.raises(InputError) as rejected, explain_failures(world):
        dist.all_reduce(torch.ones(1), group=group)
    return str(rejected.value)


@pytest.mark.slow
def test_a_timed_out_process_reports_what_every_process_was_doing(tmp_path):
    message, _ = run_ranks(wait_in_collective, 2, tmp_path)
    assert message.startswith("process 0 of 2 waited too long for the others in all_reduce")
    assert "process 1: validation after epoch 2, " in message
    assert "process 0: epoch 3, batch 1, " in message


def start(store: dist.Store, order: Sequence[int], size: int) -> list[str]:
    """Returns the name of this start in each process, by rank, when processes arrive one after the other."""
    with ThreadPoolExecutor(size) as pool:
        coming = {}
        for rank in order:
            coming[rank] = pool.submit(agree_on_name, store, rank, size, 20)
            time.sleep(0.1)
        return [coming[rank].result() for rank in range(size)]


def test_restarted_processes_get_a_new_shared_name():
    store, names = dist.HashStore(), set()
    for size, order in ((3, (0, 1, 2)), (3, (2, 1, 0)), (3, (1, 0, 2)), (2, (0, 1)), (3, (0, 2, 1)), (1, (0,))):
        started_names = start(store, order, size)
        assert len(set(started_names)) == 1, "they call it by different names"
        assert not names & set(started_names), "a name of an earlier start"
        names |= set(started_names)


def test_a_start_killed_halfway_does_not_break_the_next():
    store = dist.HashStore()
    with pytest.raises(InputError, match="process 0 of 2 waited 0 s for the others to start"):
        agree_on_name(store, 0, 2, 0.2)
    with pytest.raises(InputError, match="process 1 of 2 waited"):
        agree_on_name(store, 1, 2, 0.2)
    assert len(set(start(store, (0, 1), 2))) == 1


def test_a_single_process_never_waits():
    world = World()
    world.barrier()
    world.check_agreement({"seed": 0})
    assert world.is_rank_zero
    assert world.broadcast(3) == 3
    assert world.gather((1, 2)) == [[1, 2]]
