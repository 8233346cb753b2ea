"""Tests of the communication between the processes of a remote teacher and those of the students."""

import threading
from collections.abc import Mapping

import numpy as np
import pytest
import torch
import torch.distributed as dist

from distill.data.batches.batches import TrainBatches
from distill.data.batches.token_blocks import LanguageBlocks
from distill.teacher.remote import Bridge, serve_students
from support.processes.ranks import run_ranks

NESTED_TENSORS = {
    "logits": torch.randn(2, 3, generator=torch.Generator().manual_seed(0)),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "hidden": {2: torch.arange(6).view(2, 3), 4: torch.zeros(0, 4)},
    "pair": (torch.tensor(True), "word", None),
}


def bridge_of(rank: int, students: int, teachers: int) -> Bridge:
    return Bridge(dist.distributed_c10d._get_default_group(), rank, students, teachers)


def send_nested(rank: int) -> object:
    bridge = bridge_of(rank, 1, 1)
    if rank:
        bridge.send(NESTED_TENSORS, 0)
        return None
    return bridge.receive(1)


def test_nested_tensors_arrive_unchanged():
    received, _ = run_ranks(send_nested, 2)
    assert received.keys() == NESTED_TENSORS.keys()
    assert received["pair"][1:] == NESTED_TENSORS["pair"][1:]
    for one, other in (
        (received["logits"], NESTED_TENSORS["logits"]),
        (received["half"], NESTED_TENSORS["half"]),
        (received["hidden"][2], NESTED_TENSORS["hidden"][2]),
        (received["hidden"][4], NESTED_TENSORS["hidden"][4]),
        (received["pair"][0], NESTED_TENSORS["pair"][0]),
    ):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def query_unevenly(rank: int, students: int, teachers: int) -> object:
    """Sends rank + 1 queries as student `rank`, each from its own thread, or serves queries as a teacher."""
    bridge = bridge_of(rank, students, teachers)
    if rank >= students:
        return serve_students(bridge, lambda batch: {"logits": batch["input_ids"] * 10 + rank}), bridge.student_ranks
    teacher, replies = bridge.connect_teacher(), {}

    def ask(number: int) -> None:
        question = {"input_ids": torch.tensor([rank, number]), "labels": torch.tensor(7)}
        replies[number] = teacher(question)["logits"].tolist()

    asking = [threading.Thread(target=ask, args=(number,)) for number in range(rank + 1)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    teacher.finish()
    return replies


@pytest.mark.parametrize(("students", "teachers"), [(3, 1), (1, 2), (3, 2)])
def test_each_student_gets_the_answers_to_its_own_queries_from_its_teacher(students, teachers):
    results = run_ranks(query_unevenly, students + teachers, students, teachers)
    for rank in range(students):
        teacher = students + rank % teachers
        assert results[rank] == {number: [10 * rank + teacher, 10 * number + teacher] for number in range(rank + 1)}
    for teacher, (query_count, student_ranks) in enumerate(results[students:]):
        assert student_ranks == list(range(teacher, students, teachers))
        assert query_count == sum(rank + 1 for rank in student_ranks)


NOTE = 7  # the message tag of the teacher's note, distinct from its answers


def train_ahead(rank: int) -> int | None:
    """Trains a student that blocks in its first batch until the teacher has answered the query for the second."""
    bridge, note = bridge_of(rank, 1, 1), torch.zeros(1)
    if rank:
        query_count = 0

        def answer(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            nonlocal query_count
            query_count += 1
            if query_count == 2:
                dist.send(torch.ones(1), 0, tag=NOTE)
            return {"logits": batch["input_ids"].float()}

        serve_students(bridge, answer)
        return None
    teacher, batch_count = bridge.connect_teacher(), 0
    blocks = LanguageBlocks([np.arange(8) + i for i in range(6)])
    for batch in TrainBatches(blocks, 2, 0, seed=0, signals=teacher, threads=1):
        if not batch_count:
            dist.recv(note, 1, tag=NOTE)
        assert torch.equal(batch["signals"]["logits"], batch["input_ids"].float())
        batch_count += 1
    teacher.finish()
    return batch_count


def test_a_remote_teacher_computes_the_next_batch_while_the_student_trains():
    assert run_ranks(train_ahead, 2, limit=30)[0] == 3
