"""Activations of a CUDA device in pinned memory of the CPU, copied beside the computation in both directions."""

from collections import deque
from weakref import ReferenceType, ref

import torch
from torch import Tensor

_LEAVING = 2  # storages whose copies to the CPU may lag behind the computation, which holds their memory
_PRESENT = 4  # storages that are kept on the device after they came back, the prefetched one included


class HostMemory:
    """Bytes in pinned memory, copied by a stream of its own.

    A storage is copied while later layers compute. In the backward pass, whenever one is read, the one that was stored
    before it is copied back as well, since it is read next.

    Args:
        device: The CUDA device.
    """

    def __init__(self, device: torch.device):
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.leaving: deque[tuple[torch.cuda.Event, Tensor]] = deque()
        self.present: deque[HostCopy] = deque()
        self.last: ReferenceType[HostCopy] | None = None

    def store(self, content: Tensor) -> "HostCopy":
        """Starts to copy bytes, uint8 [bytes], to the CPU."""
        self.present.clear()  # of an earlier backward pass
        compute = torch.cuda.current_stream(self.device)
        host = torch.empty(len(content), dtype=torch.uint8, pin_memory=True)
        self.stream.wait_stream(compute)
        with torch.cuda.stream(self.stream):
            host.copy_(content, non_blocking=True)
            self.leaving.append((self.stream.record_event(), content))
        self._release_copied(compute, _LEAVING)
        copy = HostCopy(self, host, self.last)
        self.last = ref(copy)
        return copy

    def finish_forward(self) -> None:
        """Waits, on the device, for the last copies, so that their memory is free for the backward pass."""
        self._release_copied(torch.cuda.current_stream(self.device), 0)
        self.last = None

    def _release_copied(self, compute: torch.cuda.Stream, limit: int) -> None:
        # The memory's next use is on the stream of the computation, which waits for the copy first.
        while len(self.leaving) > limit:
            copied, _ = self.leaving.popleft()
            compute.wait_event(copied)

    def fetch(self, copy: "HostCopy") -> None:
        """Starts to copy bytes back, unless they are on the device."""
        if copy.content is not None:
            return
        content = torch.empty(len(copy.host), dtype=torch.uint8, device=self.device)
        content.record_stream(self.stream)  # it may be dropped unread, while it is being written
        self.stream.wait_stream(torch.cuda.current_stream(self.device))  # for the memory's earlier use
        with torch.cuda.stream(self.stream):
            content.copy_(copy.host, non_blocking=True)
            copy.arrived = self.stream.record_event()
        copy.content = content
        self.present.append(copy)
        while len(self.present) > _PRESENT:
            self.present.popleft().content = None


class HostCopy:
    """The bytes of a storage in pinned memory.

    Args:
        memory: Copies them back.
        host: The bytes.
        previous: What was stored before them in the same forward pass.
    """

    def __init__(self, memory: HostMemory, host: Tensor, previous: "ReferenceType[HostCopy] | None"):
        self.memory, self.host, self.previous = memory, host, previous
        self.content: Tensor | None = None  # on the device, complete when `arrived`
        self.arrived: torch.cuda.Event | None = None

    def load(self) -> Tensor:
        """Returns the bytes on the device, uint8 [bytes]."""
        self.memory.fetch(self)
        content, arrived = self.content, self.arrived
        assert content is not None
        assert arrived is not None
        torch.cuda.current_stream(self.memory.device).wait_event(arrived)
        previous = self.previous() if self.previous is not None else None
        if previous is not None:
            self.memory.fetch(previous)
        return content
