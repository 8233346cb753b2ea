"""The processes of a run: rank and size, synchronization, exchange of values, and agreement on settings."""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar, cast
from uuid import uuid4

from distill.errors import InputError
from pipelines.runs import stops

if TYPE_CHECKING:
    from torch.distributed import Store as TorchStore

    from distill.teacher.remote import Bridge

POLL_SECONDS = 0.05
STOP, FAILED = "stop", "failed"  # keys in the store
_Value = TypeVar("_Value")


class KeyValueStore(Protocol):
    """The key-value store that all processes share, see `torch.distributed.Store`."""

    def set(self, key: str, value: str) -> None:
        """Stores a value."""

    def get(self, key: str) -> bytes:
        """Returns a value, waiting for it."""

    def check(self, keys: list[str]) -> bool:
        """Returns whether all keys have a value."""


class FileExchange(Protocol):
    """What brings files of the output from machine to machine where they share no folder."""

    def share(self, store: KeyValueStore, unfinished: Path | None) -> None:
        """Brings files that other machines wrote here and the other way round; the first process of each calls it.

        Args:
            store: The store of the run.
            unfinished: Folder of unfinished work whose files are brought here as well.
        """

    def publish(self, store: KeyValueStore) -> None:
        """Brings files of this machine to the place where the output is kept; the first process of each calls it."""


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
    store: KeyValueStore | None = None  # required if `size` > 1
    bridge: "Bridge | None" = None  # set if the teacher has its own processes
    enclosing: "World | None" = None  # the world that includes those processes
    files: FileExchange | None = None  # set if each machine has its own copy of the output
    exchanges: int = field(default=0, init=False)

    @property
    def is_rank_zero(self) -> bool:
        """Whether this process is the first one."""
        return self.rank == 0

    @property
    def is_first_on_machine(self) -> bool:
        """Whether this process is the first one of its machine."""
        return self.size == 1 or is_first_on_machine()

    @property
    def manages_files(self) -> bool:
        """Whether this process creates, renames and removes folders of the output, or of its machine's copy of it."""
        return self.is_rank_zero if self.files is None else self.is_first_on_machine

    @property
    def everyone(self) -> "World":
        """The world of all processes of the run, including the teacher's own."""
        return self.enclosing or self

    @property
    def is_teacher(self) -> bool:
        """Whether this process is one of the teacher's own."""
        return self.bridge is not None and self.bridge.rank >= self.bridge.students

    @property
    def shared_store(self) -> KeyValueStore:
        """The store of a run of several processes."""
        if self.store is None:
            raise RuntimeError(f"a world of {self.size} processes needs a store to exchange values")
        return self.store

    def broadcast(self, value: _Value | None = None) -> _Value:
        """Returns the first process's value (JSON types); every process calls it, in the same order."""
        if self.size == 1:
            return cast(_Value, value)
        key = self._next_key()
        if self.is_rank_zero:
            self.shared_store.set(key, json.dumps(value))
        return cast(_Value, json.loads(self.wait_for(key)))

    def gather(self, value: _Value) -> list[_Value]:
        """Returns the values of all processes (JSON types), ordered by rank."""
        if self.size == 1:
            return [json.loads(json.dumps(value))]
        key = self._next_key()
        self.shared_store.set(f"{key}/{self.rank}", json.dumps(value))
        return [json.loads(self.wait_for(f"{key}/{rank}")) for rank in range(self.size)]

    def compute_once(self, compute: Callable[[], _Value]) -> _Value:
        """Returns the value (JSON types, not null) that the first process of this machine computes.

        Every process calls it, in the same order. Files are then read once on each machine instead of once by each
        process, and `check_agreement` still detects a machine whose files differ.
        """
        if self.size == 1:
            return compute()
        values: list[_Value | None] = self.gather(compute() if self.is_first_on_machine else None)
        return next(value for value in reversed(values[: self.rank + 1]) if value is not None)

    def barrier(self) -> None:
        """Returns when every process has called it."""
        self.gather(None)

    def share_files(self, unfinished: Path | None = None) -> None:
        """Returns when every process has called it and sees what the others have written to the output.

        Args:
            unfinished: Folder of unfinished work that the processes read. Where machines share no folder, they don't
                get each other's checkpoints and other unfinished work unless it is named here.
        """
        self.barrier()
        if self.files is not None:
            if self.is_first_on_machine:
                self.files.share(self.shared_store, unfinished)
            self.barrier()

    def publish_files(self) -> None:
        """Stores what the machines have written at the output's URL; the first process of each machine calls it."""
        if self.files is not None:
            self.files.publish(self.shared_store)

    def wait_for(self, key: str) -> str:
        """Returns the value of a key as soon as a process has set it."""
        return wait_for_key(self.shared_store, key)

    def record_position(self, position: str) -> None:
        """Records what this process is doing, for error messages of the others."""
        if self.size > 1:
            self.shared_store.set(f"place/{self.rank}", json.dumps([position, time.time()]))

    def read_positions(self) -> list[str]:
        """Returns the last recorded position of each process and its age."""
        positions = []
        for rank in range(self.size):
            if self.shared_store.check([f"place/{rank}"]):
                position, when = json.loads(self.shared_store.get(f"place/{rank}").decode())
                positions.append(f"{position}, {time.time() - when:.0f} s ago")
            else:
                positions.append("not started")
        return positions

    def request_stop(self, number: int) -> None:
        """Informs the other processes that a stop of this process was requested."""
        if self.size > 1:
            self.shared_store.set(STOP, str(int(number)))

    def read_stop_request(self) -> int | None:
        """Returns the signal that requested a stop of this or another process; None if there was none."""
        number = stops.requested_signal()
        if number is None and self.size > 1 and self.shared_store.check([STOP]):
            return int(self.shared_store.get(STOP))
        return number

    def report_failure(self, message: str) -> None:
        """Records why this process ends, for the processes that lose it."""
        self.shared_store.set(FAILED, json.dumps([self.rank, message]))

    def read_failure(self) -> tuple[int, str] | None:
        """Returns the rank and message of the process that failed, if one has recorded its failure."""
        if not self.shared_store.check([FAILED]):
            return None
        rank, message = json.loads(self.shared_store.get(FAILED))
        return rank, message

    def check_agreement(self, facts: Mapping[str, object]) -> None:
        """Checks that all processes pass the same facts.

        Raises:
            InputError: The facts differ; the message names the process and the difference.
        """
        gathered = self.gather(facts)
        for rank, theirs in enumerate(gathered):
            for name in {**gathered[0], **theirs}:
                expected, other = gathered[0].get(name), theirs.get(name)
                if expected != other:
                    raise InputError(
                        f"process {rank} of {self.size}: expected {name} to be {_shorten(expected)} as on process 0, "
                        f"found {_shorten(other)}: the processes would train different models or wait for each other "
                        "forever"
                    )

    def check_folder(self, folder: Path) -> None:
        """Checks that all processes see the first process's folder, unless each machine has its own copy.

        Raises:
            InputError: A process doesn't see the folder.
        """
        if self.size == 1 or self.files is not None:
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
                f"output {str(folder)!r}: process {blind[0]} doesn't see the folder of process 0: choose one on a disk "
                "that all machines of the run share"
            )

    def _next_key(self) -> str:
        self.exchanges += 1
        return f"stillroom/{self.exchanges}"


def wait_for_key(store: KeyValueStore, key: str) -> str:
    """Returns the value of a key as soon as a process has set it."""
    while not store.check([key]):
        time.sleep(POLL_SECONDS)
    return store.get(key).decode()


def flatten_settings(settings: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Returns nested settings as a flat dict with dotted names, such as `train.epochs`."""
    flat: dict[str, object] = {}
    for name, value in settings.items():
        full = f"{prefix}{name}"
        flat |= flatten_settings(value, f"{full}.") if isinstance(value, Mapping) else {full: value}
    return flat


def _shorten(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def is_distributed() -> bool:
    """Returns whether this process is one of several, started by torchrun or by a Stillroom command."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_first_process() -> bool:
    """Returns whether this process is the only one or the first of several; works before they are connected."""
    return os.environ.get("RANK", "0") == "0"


def is_first_on_machine() -> bool:
    """Returns whether this process is the first one of its machine; works before they are connected."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def count_processes() -> int:
    """Returns the number of processes that this run was started with."""
    return int(os.environ["WORLD_SIZE"]) if is_distributed() else 1


def find_machine() -> tuple[int, int]:
    """Returns the number of this machine and the number of machines that the run was started on."""
    per_machine, size = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), count_processes()
    if not is_distributed():
        return 0, 1
    number = os.environ.get("GROUP_RANK", int(os.environ["RANK"]) // per_machine)
    return int(number), int(os.environ.get("GROUP_WORLD_SIZE", size // per_machine))


def join_world(seconds: float, teachers: int = 0, files: FileExchange | None = None) -> World:
    """Connects this process with the others; collectives that take longer than `seconds` fail.

    The last `teachers` processes hold the teacher. They and the students' processes are separate worlds, also for
    Lightning and `torch.distributed`, connected by a bridge. `files` is for a run whose machines share no folder.

    Raises:
        InputError: No process is left for the student, or the student's processes don't fill whole machines.
    """
    if not is_distributed():
        return World()
    import torch
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    limit = max(seconds, 120)
    root, rank, size = next(iter(rendezvous("env://", timeout=timedelta(seconds=limit))))
    store: TorchStore = dist.PrefixStore(agree_on_name(root, rank, size, limit), root)
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cpu:gloo,cuda:nccl"
    world = World(rank, size, dist.PrefixStore("stillroom", store), files=files)
    if teachers:
        world, store = split_world(world, store, teachers)
    if not dist.is_initialized():
        dist.init_process_group(
            backend, store=dist.PrefixStore("torch", store), rank=world.rank, world_size=world.size,
            timeout=timedelta(seconds=seconds),
        )  # fmt: skip
    return world


def agree_on_name(store: KeyValueStore, rank: int, size: int, seconds: float) -> str:
    """Returns a name that the processes share in this start of the run, distinct from that of any earlier start.

    The launcher keeps its store when it restarts the processes. Without a new name they would read the values of the
    dead processes, and try to connect with them.

    Raises:
        InputError: Not all processes have started within `seconds`.
    """
    token, end = uuid4().hex, time.monotonic() + seconds
    store.set(f"come/{rank}", token)
    for name in _propose_name(store, size) if rank == 0 else _confirm_name(store, rank, token):
        if name:
            return name
        if time.monotonic() > end:
            raise InputError(f"process {rank} of {size} waited {seconds:.0f} s for the others to start")
        time.sleep(POLL_SECONDS)
    raise AssertionError


def _propose_name(store: KeyValueStore, size: int) -> Iterator[str]:
    """First process's side: proposes a name to the processes that have started, until all of these confirm it."""
    named: list[str] = []
    name = ""
    while True:
        keys = [f"come/{rank}" for rank in range(size)]
        arrived = [store.get(key).decode() for key in keys] if store.check(keys) else []
        if arrived != named:
            named, name = arrived, uuid4().hex
            store.set("named", json.dumps([name, named]))
        if name and store.check([f"{name}/{rank}" for rank in range(1, size)]):
            store.set(f"{name}/all", "")
            yield name
        yield ""


def _confirm_name(store: KeyValueStore, rank: int, token: str) -> Iterator[str]:
    """Other processes' side: confirms a name that was proposed to this process, but none proposed earlier."""
    confirmed = ""
    while True:
        name, named = json.loads(store.get("named")) if store.check(["named"]) else ("", [])
        if token in named and name != confirmed:
            confirmed = name
            store.set(f"{name}/{rank}", "")
        yield confirmed if confirmed and store.check([f"{confirmed}/all"]) else ""


def split_world(everyone: World, store: "TorchStore", teachers: int) -> tuple[World, "TorchStore"]:
    """Returns this process's world, that of the students or of the teachers, and its store."""
    import torch.distributed as dist

    from distill.teacher.remote import Bridge, PointToPointGroup

    students = everyone.size - teachers
    local_students = count_local_students(everyone.size, students)
    # Long timeout: teachers wait while the students validate; a dead process is detected by its connection.
    group = dist.ProcessGroupGloo(dist.PrefixStore("bridge", store), everyone.rank, everyone.size, timedelta(weeks=1))
    bridge = Bridge(cast(PointToPointGroup, group), everyone.rank, students, teachers)
    if everyone.rank >= students:
        rank, size, name, local = everyone.rank - students, teachers, "teachers", teachers
    else:
        rank, size, name, local = everyone.rank, students, "own", local_students
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(local))
    world_store = dist.PrefixStore(name, store)
    return World(rank, size, dist.PrefixStore("stillroom", world_store), bridge, everyone), world_store


def count_local_students(size: int, students: int) -> int:
    """Returns the number of student processes per machine.

    Raises:
        InputError: No process is left for the student, or the student's processes don't fill whole machines.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(size)))
    if students < 1:
        raise InputError(
            f"teacher.processes: expected at least 1 of {size} processes for the student, found {students}: nothing "
            "would be trained"
        )
    if local < size and students % local:
        raise InputError(
            f"teacher.processes: expected a multiple of the {local} processes of a machine for the student, or a "
            f"single machine, found {students} of {size}: a machine would be shared by students and teachers"
        )
    return min(local, students)


def leave_world() -> None:
    """Destroys the process group, so that a process that ends early isn't treated as failed."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
