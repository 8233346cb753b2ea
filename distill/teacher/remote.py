"""A teacher on processes of its own, and its communication with the students' processes."""

import math
import pickle
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from distill.losses.teacher_signals import SignalSource, TeacherSignals
from distill.models.inputs import OUTPUT_FIELDS


class _Work(Protocol):
    def wait(self) -> object: ...


class PointToPointGroup(Protocol):
    """The methods of a ProcessGroupGloo that its type stub lacks."""

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> _Work:
        """Starts to send a tensor to a process."""

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> _Work:
        """Starts to receive a tensor from a process."""


@dataclass(frozen=True)
class Bridge:
    """Connects `students` processes, which come first in `group`, with `teachers` processes.

    Args:
        group: A gloo group of all of them that nothing else uses; tensors are sent from CPU memory.
        rank: This process's rank in the group.
        students, teachers: Number of processes of each kind.
    """

    group: PointToPointGroup
    rank: int
    students: int
    teachers: int

    def connect_teacher(self) -> "RemoteTeacher":
        """Returns the teacher that this student process queries."""
        return RemoteTeacher(self, self.students + self.rank % self.teachers)

    @property
    def student_ranks(self) -> list[int]:
        """The ranks of the student processes that this teacher process serves."""
        return list(range(self.rank - self.students, self.students, self.teachers))

    def send(self, value: object, target: int) -> None:
        """Sends a nested structure of tensors and plain values to the process `target`.

        The memory of the tensors may be reused afterwards.
        """
        leaves, structure = pytree.tree_flatten(value)
        tensors = [leaf.detach().cpu().contiguous() for leaf in leaves if isinstance(leaf, Tensor)]
        plain = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]
        header = pickle.dumps((structure, plain, [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]))
        self._send_bytes(torch.tensor([len(header)]), target)
        self._send_bytes(torch.frombuffer(bytearray(header), dtype=torch.uint8), target)
        for tensor in tensors:
            self._send_bytes(tensor.reshape(-1).view(torch.uint8), target)

    def receive(self, source: int) -> object:
        """Returns the next message of the process `source`, waiting for it as long as necessary."""
        header = self._receive_bytes(int(self._receive_bytes(8, source).view(torch.int64)), source)
        structure, plain, formats = pickle.loads(header.numpy().tobytes())  # noqa: S301, from a process of this run
        remaining = iter(formats)
        leaves = [self._receive_tensor(next(remaining), source) if leaf is None else leaf[0] for leaf in plain]
        return pytree.tree_unflatten(leaves, structure)

    def _receive_tensor(self, dtype_and_shape: tuple[torch.dtype, tuple[int, ...]], source: int) -> Tensor:
        dtype, shape = dtype_and_shape
        return self._receive_bytes(math.prod(shape) * dtype.itemsize, source).view(dtype).view(shape)

    def _send_bytes(self, tensor: Tensor, target: int) -> None:
        if tensor.nbytes:
            self.group.send([tensor], target, 0).wait()

    def _receive_bytes(self, size: int, source: int) -> Tensor:
        received = torch.empty(size, dtype=torch.uint8)
        if size:
            self.group.recv([received], source, 0).wait()
        return received


class RemoteTeacher:
    """Client of a teacher in another process, called like a teacher in memory; concurrent threads wait for each other.

    As the `signals` of a data module it is called one batch ahead: the teacher computes while the students train on the
    previous batch.

    Args:
        bridge: The connection of this process.
        rank: The teacher's rank in the bridge's group.
    """

    def __init__(self, bridge: Bridge, rank: int):
        self.bridge, self.rank, self.lock = bridge, rank, threading.Lock()

    def __call__(self, batch: Mapping[str, Tensor]) -> TeacherSignals:
        """Returns the teacher's signals for a padded batch."""
        with self.lock:
            self.bridge.send({name: batch[name] for name in OUTPUT_FIELDS if name in batch}, self.rank)
            return cast(TeacherSignals, self.bridge.receive(self.rank))

    def finish(self) -> None:
        """Notifies the teacher's process that no further batches follow."""
        with self.lock:
            self.bridge.send(None, self.rank)


def serve_students(bridge: Bridge, teacher: SignalSource) -> int:
    """Serves this process's students, one after the other, until all have finished; returns the number of batches."""
    students, served = bridge.student_ranks, 0
    while students:
        for student in list(students):
            batch = cast(Mapping[str, Tensor] | None, bridge.receive(student))
            if batch is None:
                students.remove(student)
            else:
                bridge.send(teacher(batch), student)
                served += 1
    return served
