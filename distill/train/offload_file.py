"""A file for activations of a model on the CPU, of which only the parts that are in use are mapped into memory."""

import errno
import mmap
import os
import tempfile
from collections import deque
from pathlib import Path
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from distill.errors import InputError

_PAGE = mmap.ALLOCATIONGRANULARITY


class ActivationFile:
    """Bytes in a temporary file, which has no name, so that nothing is left of it after a kill.

    The file grows to the most bytes that are stored at the same time, up to fragmentation, and its space is reused.
    Written pages belong to the system's cache of files, which the system empties when memory is short.

    Args:
        folder: A folder on a disk; on a file system in memory nothing is saved.
    """

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.space = folder, FileSpace()
        self.file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - open as long as this object

    @property
    def size(self) -> int:
        """Length of the file in bytes."""
        return os.fstat(self.file.fileno()).st_size

    def store(self, content: Tensor) -> "Extent":
        """Writes bytes, uint8 [bytes].

        Raises:
            InputError: The disk is full.
        """
        extent = Extent(self, self.space.take(len(content)), len(content))
        left, offset = memoryview(content.numpy().data), extent.offset
        try:
            while left:  # a call writes 2 GiB at most
                written = os.pwrite(self.file.fileno(), left, offset)
                left, offset = left[written:], offset + written
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise InputError(
                f"train.offload activations: expected {len(content):,} bytes of space beside {self.size:,} in "
                f"{self.folder}, found too little ({error.strerror}): use train.checkpointing full, or another disk"
            ) from error
        return extent

    def finish_forward(self) -> None:
        """Does nothing; everything is written."""


class Extent:
    """A part of the file; its space is free again when nothing refers to it, memory that maps it included."""

    def __init__(self, file: ActivationFile, offset: int, length: int):
        self.file, self.offset, self.length = file, offset, length
        self.mapping: ReferenceType[_Mapping] | None = None

    def load(self) -> Tensor:
        """Returns the bytes in memory that maps the file, uint8 [bytes]; writing to it doesn't change the file."""
        mapping = self.mapping() if self.mapping is not None else None
        if mapping is None:
            mapping = _Mapping(self.file.file.fileno(), self.length, offset=self.offset, access=mmap.ACCESS_COPY)
            mapping.extent = self
            self.mapping = ref(mapping)
        return torch.frombuffer(mapping, dtype=torch.uint8)

    def __del__(self) -> None:
        self.file.space.give_back(self.offset, self.length)


class _Mapping(mmap.mmap):
    """Memory that maps an extent; the tensors in it refer to this object."""

    extent: Extent


class FileSpace:
    """The free parts of a file, in whole pages; the end of the file is unlimited."""

    def __init__(self) -> None:
        self.end = 0
        self.free: list[tuple[int, int]] = []  # offset and length, in order, never adjacent
        # Objects die in any thread and within any allocation, so that only `take` touches the list.
        self.returned: deque[tuple[int, int]] = deque()

    def take(self, length: int) -> int:
        """Returns the offset of free space, the first that is large enough."""
        while self.returned:
            self._merge(*self.returned.popleft())
        pages = _round_up(length)
        for number, (offset, available) in enumerate(self.free):
            if available >= pages:
                rest = [(offset + pages, available - pages)] if available > pages else []
                self.free[number : number + 1] = rest
                return offset
        self.end += pages
        return self.end - pages

    def give_back(self, offset: int, length: int) -> None:
        """Makes space free again."""
        self.returned.append((offset, _round_up(length)))

    def _merge(self, offset: int, length: int) -> None:
        self.free = sorted([*self.free, (offset, length)])
        joined: list[tuple[int, int]] = []
        for start, size in self.free:
            if joined and sum(joined[-1]) == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + size)
            else:
                joined.append((start, size))
        if joined and sum(joined[-1]) == self.end:
            self.end = joined.pop()[0]
        self.free = joined


def _round_up(length: int) -> int:
    return -(-length // _PAGE) * _PAGE
