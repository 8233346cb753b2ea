"""The processes of a run: rank and size, synchronization, exchange of values, and agreement on settings."""

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

from distill.errors import InputError
from pipelines.runs import stops

POLL_SECONDS = 0.05
STOP, FAILED = "stop", "failed"  # keys in the store


class LostError(RuntimeError):
    """Another process failed during an operation that all processes take part in."""


@dataclass
class World:
    """One process among `size`. The default is a run of one process, which never waits.

    Values exchanged here go through a key-value store and have no time limit: the first process may train for hours
    while the others wait. If it dies, the launcher ends the others.
    """

    rank: int = 0
    size: int = 1
    store: Any = None
    bridge: Any = None  # a `distill.teacher.remote.Bridge` if the teacher has its own processes
    around: "World | None" = None  # the world that includes those processes
    told: int = field(default=0, init=False)

    @property
    def is_rank_zero(self) -> bool:
        return self.rank == 0

    @property
    def everyone(self) -> "World":
        """The world of all processes of the run, including the teacher's own."""
        return self.around or self

    @property
    def teaches(self) -> bool:
        """Whether this process is one of the teacher's own."""
        return self.bridge is not None and self.bridge.rank >= self.bridge.students

    def broadcast(self, value: Any = None) -> Any:
        """Returns the first process's value (JSON types); every process calls it, in the same order."""
        if self.size == 1:
            return value
        key = self.next_key()
        if self.is_rank_zero:
            self.store.set(key, json.dumps(value))
        return json.loads(self.get(key))

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all processes (JSON types), ordered by rank."""
        if self.size == 1:
            return [json.loads(json.dumps(value))]
        key = self.next_key()
        self.store.set(f"{key}/{self.rank}", json.dumps(value))
        return [json.loads(self.get(f"{key}/{rank}")) for rank in range(self.size)]

    def barrier(self) -> None:
        """Returns when every process has called it."""
        self.gather(None)

    def next_key(self) -> str:
        self.told += 1
        return f"stillroom/{self.told}"

    def get(self, key: str) -> str:
        while not self.store.check([key]):
            time.sleep(POLL_SECONDS)
        return self.store.get(key).decode()

    def note(self, place: str) -> None:
        """Records the current position of this process."""
        if self.size > 1:
            self.store.set(f"place/{self.rank}", json.dumps([place, time.time()]))

    def places(self) -> list[str]:
        """Returns the last recorded position of each process and its age."""
        found = []
        for rank in range(self.size):
            if self.store.check([f"place/{rank}"]):
                place, when = json.loads(self.store.get(f"place/{rank}").decode())
                found.append(f"{place}, {time.time() - when:.0f} s ago")
            else:
                found.append("nowhere yet")
        return found

    def ask_to_stop(self, number: int) -> None:
        """Informs the other processes that a stop of this process was requested."""
        if self.size > 1:
            self.store.set(STOP, str(int(number)))

    def stop_asked(self) -> int | None:
        """Returns the signal that requested a stop of this or another process; None if there was none."""
        number = stops.requested()
        if number is None and self.size > 1 and self.store.check([STOP]):
            return int(self.store.get(STOP))
        return number

    def report_failure(self, message: str) -> None:
        """Records why this process ends, for the processes that lose it."""
        self.store.set(FAILED, json.dumps([self.rank, message]))

    def failure(self) -> tuple[int, str] | None:
        """Returns the rank and message of the process that failed, if one has recorded its failure."""
        if not self.store.check([FAILED]):
            return None
        rank, message = json.loads(self.store.get(FAILED))
        return rank, message

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Checks that all processes pass the same facts.

        Raises:
            InputError: The facts differ; the message names the process and the difference.
        """
        found = self.gather(facts)
        for rank, theirs in enumerate(found):
            for name in {**found[0], **theirs}:
                ours, other = found[0].get(name), theirs.get(name)
                if ours != other:
                    raise InputError(
                        f"process {rank} of {self.size} disagrees about {name}: {shown(other)}, and process 0 has "
                        f"{shown(ours)}: they would train different models or wait for each other for ever"
                    )

    def check_folder(self, folder: Path) -> None:
        """Checks that all processes see the first process's folder.

        Raises:
            InputError: A process doesn't see the folder.
        """
        if self.size == 1:
            return
        token = folder / ".seen"
        if self.is_rank_zero:
            token.touch()
        self.barrier()
        seen = self.gather(token.exists())
        if self.is_rank_zero:
            token.unlink()
        blind = [rank for rank, sees in enumerate(seen) if not sees]
        if blind:
            raise InputError(
                f"output {str(folder)!r}: process {blind[0]} doesn't see the folder of process 0: name one on a disk "
                "that every machine of the run has"
            )


def flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested settings as a flat dict with dotted names, such as `train.epochs`."""
    found: dict[str, Any] = {}
    for name, inner in value.items():
        found |= flat(inner, f"{prefix}{name}.") if isinstance(inner, Mapping) else {f"{prefix}{name}": inner}
    return found


def shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def launched() -> bool:
    """Returns whether this process is one of several, started by torchrun or by a Stillroom command."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_first() -> bool:
    """Returns whether this process is the only one or the first of several; works before they are connected."""
    return os.environ.get("RANK", "0") == "0"


def processes() -> int:
    """Returns the number of processes that this run was started with."""
    return int(os.environ["WORLD_SIZE"]) if launched() else 1


def join_world(seconds: float, teachers: int = 0) -> World:
    """Connects this process with the others; collectives that take longer than `seconds` fail.

    The last `teachers` processes hold the teacher. They and the students' processes are separate worlds, also for
    Lightning and `torch.distributed`, connected by a bridge.

    Raises:
        InputError: No process is left for the student, or the student's processes don't fill whole machines.
    """
    if not launched():
        return World()
    import torch
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    limit = max(seconds, 120)
    store, rank, size = next(iter(rendezvous("env://", timeout=timedelta(seconds=limit))))
    store = dist.PrefixStore(start_of(store, rank, size, limit), store)
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cpu:gloo,cuda:nccl"
    own = World(rank, size, dist.PrefixStore("stillroom", store))
    if teachers:
        own, store = split_world(own, store, teachers)
    if not dist.is_initialized():
        dist.init_process_group(
            backend, store=dist.PrefixStore("torch", store), rank=own.rank, world_size=own.size,
            timeout=timedelta(seconds=seconds),
        )  # fmt: skip
    return own


def start_of(store: Any, rank: int, size: int, seconds: float) -> str:
    """Returns a name that the processes share in this start of the run, distinct from that of any earlier start.

    The launcher keeps its store when it restarts the processes. Without a new name they would read the values of the
    dead processes, and try to connect with them.

    Raises:
        InputError: Not all processes have started within `seconds`.
    """
    own, end = uuid4().hex, time.monotonic() + seconds
    store.set(f"come/{rank}", own)
    take_part = propose_name(store, size) if rank == 0 else confirm_name(store, rank, own)
    for name in take_part:
        if name:
            return name
        if time.monotonic() > end:
            raise InputError(f"process {rank} of {size} waited {seconds:.0f} s for the others to start")
        time.sleep(POLL_SECONDS)
    raise AssertionError


def propose_name(store: Any, size: int) -> Iterator[str]:
    """First process's side: proposes a name to the processes that have started, until all of these confirm it."""
    named: list[str] = []
    name = ""
    while True:
        keys = [f"come/{rank}" for rank in range(size)]
        come = [store.get(key).decode() for key in keys] if store.check(keys) else []
        if come != named:
            named, name = come, uuid4().hex
            store.set("named", json.dumps([name, named]))
        if name and store.check([f"{name}/{rank}" for rank in range(1, size)]):
            store.set(f"{name}/all", "")
            yield name
        yield ""


def confirm_name(store: Any, rank: int, own: str) -> Iterator[str]:
    """Other processes' side: confirms a name that was proposed to this process, but none proposed earlier."""
    answered = ""
    while True:
        name, named = json.loads(store.get("named")) if store.check(["named"]) else ("", [])
        if own in named and name != answered:
            answered = name
            store.set(f"{name}/{rank}", "")
        yield answered if answered and store.check([f"{answered}/all"]) else ""


def split_world(everyone: World, store: Any, teachers: int) -> tuple[World, Any]:
    """Returns this process's world, that of the students or of the teachers, and its store."""
    import torch.distributed as dist

    from distill.teacher.remote import Bridge

    students = everyone.size - teachers
    here = students_here(everyone.size, students)
    # Long timeout: teachers wait while the students validate; a dead process is detected by its connection.
    group = dist.ProcessGroupGloo(dist.PrefixStore("bridge", store), everyone.rank, everyone.size, timedelta(weeks=1))
    bridge = Bridge(group, everyone.rank, students, teachers)
    teaches = everyone.rank >= students
    rank, size, name = (everyone.rank - students, teachers, "teachers") if teaches else (everyone.rank, students, "own")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(teachers if teaches else here))
    own = dist.PrefixStore(name, store)
    return World(rank, size, dist.PrefixStore("stillroom", own), bridge, everyone), own


def students_here(size: int, students: int) -> int:
    """Returns the number of student processes per machine.

    Raises:
        InputError: No process is left for the student, or the student's processes don't fill whole machines.
    """
    here = int(os.environ.get("LOCAL_WORLD_SIZE", str(size)))
    if students < 1:
        raise InputError(f"teacher.ranks: leaves {students} of {size} processes to the student; expected at least 1")
    if here < size and students % here:
        raise InputError(
            f"teacher.ranks: leaves {students} of {size} processes to the student, and a machine has {here}: expected "
            f"a multiple of {here}, or one machine"
        )
    return min(here, students)


def leave_world() -> None:
    """Destroys the process group, so that a process that ends early isn't treated as failed."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
