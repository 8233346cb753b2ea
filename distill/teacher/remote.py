"""A teacher on processes of its own, and its communication with the students' processes."""

import math
import pickle
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from distill.teacher.online import TEACHER_INPUTS


@dataclass(frozen=True)
class Bridge:
    """Connects `students` processes, which come first in `group`, with `teachers` processes.

    Args:
        group: A gloo group of all of them that nothing else uses; tensors are sent from CPU memory.
        rank: This process's rank in the group.
        students, teachers: Number of processes of each kind.
    """

    group: Any
    rank: int
    students: int
    teachers: int

    def teacher(self) -> "RemoteTeacher":
        """Returns the teacher that this student process queries."""
        return RemoteTeacher(self, self.students + self.rank % self.teachers)

    def pupils(self) -> list[int]:
        """Returns the ranks of the student processes that this teacher process serves."""
        return list(range(self.rank - self.students, self.students, self.teachers))

    def send(self, value: Any, to: int) -> None:
        """Sends any nested structure of tensors and plain values; returns when the memory may be reused."""
        leaves, form = pytree.tree_flatten(value)
        tensors = [leaf.detach().cpu().contiguous() for leaf in leaves if isinstance(leaf, Tensor)]
        rest = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]
        head = pickle.dumps((form, rest, [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]))
        self._put(torch.tensor([len(head)]), to)
        self._put(torch.frombuffer(bytearray(head), dtype=torch.uint8), to)
        for tensor in tensors:
            self._put(tensor.reshape(-1).view(torch.uint8), to)

    def receive(self, source: int) -> Any:
        """Returns the next message of the process `source`, waiting for it as long as necessary."""
        head = self._get(int(self._get(8, source).view(torch.int64)), source)
        form, rest, shapes = pickle.loads(head.numpy().tobytes())
        places = iter(shapes)
        leaves = [self._tensor(next(places), source) if plain is None else plain[0] for plain in rest]
        return pytree.tree_unflatten(leaves, form)

    def _tensor(self, place: tuple[torch.dtype, tuple[int, ...]], source: int) -> Tensor:
        dtype, shape = place
        return self._get(math.prod(shape) * dtype.itemsize, source).view(dtype).view(shape)

    def _put(self, tensor: Tensor, to: int) -> None:
        if tensor.nbytes:
            self.group.send([tensor], to, 0).wait()

    def _get(self, size: int, source: int) -> Tensor:
        found = torch.empty(size, dtype=torch.uint8)
        if size:
            self.group.recv([found], source, 0).wait()
        return found


class RemoteTeacher:
    """Client of a teacher in another process, called like a teacher in memory; concurrent threads wait for each other.

    As the `signals` of a data module it is called ahead: the teacher computes while the students train on the previous
    batch.
    """

    def __init__(self, bridge: Bridge, rank: int):
        self.bridge, self.rank, self.lock = bridge, rank, threading.Lock()

    def __call__(self, batch: Mapping[str, Tensor]) -> Mapping[str, Any]:
        with self.lock:
            self.bridge.send({name: batch[name] for name in TEACHER_INPUTS if name in batch}, self.rank)
            return self.bridge.receive(self.rank)

    def finish(self) -> None:
        """Notifies the teacher's process that no further batches follow."""
        with self.lock:
            self.bridge.send(None, self.rank)


def serve(bridge: Bridge, answer: Callable[[Mapping[str, Tensor]], Mapping[str, Any]]) -> int:
    """Serves this process's students, one after the other, until all have finished; returns the number of batches."""
    pupils, answered = bridge.pupils(), 0
    while pupils:
        for pupil in list(pupils):
            question = bridge.receive(pupil)
            if question is None:
                pupils.remove(pupil)
            else:
                bridge.send(answer(question), pupil)
                answered += 1
    return answered
