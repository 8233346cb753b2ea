"""A teacher on processes of its own: what crosses between them and the students' processes, and who asks whom."""

import math
import pickle
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from distill.teacher.online import ASKED


@dataclass(frozen=True)
class Bridge:
    """Joins `students` processes, which come first in `group`, to `teachers` processes.

    Args:
        group: A gloo group of all of them that nothing else uses; what crosses it lies in the CPU's memory.
        rank: This process's place in it.
        students, teachers: How many of each there are.
    """

    group: Any
    rank: int
    students: int
    teachers: int

    def teacher(self) -> "RemoteTeacher":
        """The one that this student's process asks."""
        return RemoteTeacher(self, self.students + self.rank % self.teachers)

    def pupils(self) -> list[int]:
        """The students' processes that this teacher's process answers."""
        return list(range(self.rank - self.students, self.students, self.teachers))

    def send(self, value: Any, to: int) -> None:
        """Any nest of tensors and plain values; returns when the memory may be used again."""
        leaves, form = pytree.tree_flatten(value)
        tensors = [leaf.detach().cpu().contiguous() for leaf in leaves if isinstance(leaf, Tensor)]
        rest = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]
        head = pickle.dumps((form, rest, [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]))
        self._put(torch.tensor([len(head)]), to)
        self._put(torch.frombuffer(bytearray(head), dtype=torch.uint8), to)
        for tensor in tensors:
            self._put(tensor.reshape(-1).view(torch.uint8), to)

    def receive(self, source: int) -> Any:
        """What the process `source` sends next; waits for it as long as it takes."""
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
    """Asked like a teacher in memory; threads that ask at once wait for each other.

    Given to a data module as its `signals`, it is asked ahead: it works while the students train on the batch before.
    """

    def __init__(self, bridge: Bridge, rank: int):
        self.bridge, self.rank, self.lock = bridge, rank, threading.Lock()

    def __call__(self, batch: Mapping[str, Tensor]) -> Mapping[str, Any]:
        with self.lock:
            self.bridge.send({name: batch[name] for name in ASKED if name in batch}, self.rank)
            return self.bridge.receive(self.rank)

    def finish(self) -> None:
        """Lets the teacher go."""
        with self.lock:
            self.bridge.send(None, self.rank)


def serve(bridge: Bridge, answer: Callable[[Mapping[str, Tensor]], Mapping[str, Any]]) -> int:
    """Answers this process's pupils, each in its turn, until all have finished; returns the number of answers."""
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
