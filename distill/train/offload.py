"""Activation offload: what autograd saves for the backward pass leaves the memory of the device in between.

On a GPU it goes to the CPU's memory, on a CPU to a file. The bytes come back as they were, so that losses and gradients
are those of the plain step.

Source: `torch.autograd.graph.save_on_cpu`, and the streams of torchtune's OffloadActivations; here whole storages are
moved, so that views of the same memory are stored once and come back with their strides.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from distill.errors import InputError
from distill.train.offload_device import HostMemory
from distill.train.offload_file import ActivationFile

_SMALLEST_STORAGE = 64 << 10  # bytes; smaller storages stay, since moving them takes longer than it saves


class StoredBytes(Protocol):
    """The bytes of a storage elsewhere; their place is free again when nothing refers to this object."""

    def load(self) -> Tensor:
        """Returns the bytes on the device, uint8 [bytes]."""


class Place(Protocol):
    """Where bytes are stored."""

    def store(self, content: Tensor) -> StoredBytes:
        """Stores bytes, uint8 [bytes] on the device."""

    def finish_forward(self) -> None:
        """Is called after a forward pass."""


@dataclass(frozen=True)
class SavedView:
    """What autograd keeps of an offloaded tensor: the stored memory, and the view of it.

    Args:
        stored: The tensor's whole storage.
        dtype, size, stride, offset: The view of it; the offset is in elements.
        sharded: The tensor of which this is the local part, None if it isn't sharded. It has no memory of its own.
    """

    stored: StoredBytes
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    sharded: "ShardedView | None"

    def load(self) -> Tensor:
        """Returns the tensor on the device."""
        content = self.stored.load()
        view = torch.empty(0, dtype=self.dtype, device=content.device)
        view.set_(content.untyped_storage(), self.offset, self.size, self.stride)
        return view if self.sharded is None else self.sharded.wrap(view)


@dataclass(frozen=True)
class ShardedView:
    """What a DTensor is beside its local part."""

    context: Any
    mesh: Any
    size: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: DTensor) -> "ShardedView":
        """Returns that of a tensor."""
        return cls(tensor.__tensor_flatten__()[1], tensor.device_mesh, tensor.size(), tensor.stride())

    def wrap(self, local: Tensor) -> Tensor:
        """Returns the DTensor with this local part."""
        inner = {"_local_tensor": local, "device_mesh": self.mesh}
        whole: Tensor = DTensor.__tensor_unflatten__(inner, self.context, self.size, self.stride)
        return whole.detach()


class ActivationOffload:
    """Offloads what forward passes save for the backward pass.

    Parameters, buffers, the tensors of the batch and small ones stay where they are.

    Args:
        device: Where the model computes.
        folder: Of the file for a model on the CPU; the file is gone when the process ends, however it does.
        smallest: Size in bytes from which a storage is moved.

    Raises:
        InputError: The device is neither a CPU nor a CUDA device.
    """

    def __init__(self, device: torch.device, folder: Path, *, smallest: int = _SMALLEST_STORAGE):
        if device.type not in ("cpu", "cuda"):
            raise InputError(
                f"train.offload activations: expected a CPU or a CUDA device, found {device.type}: there is no other "
                "memory that activations could go to"
            )
        self.device, self.smallest = device, smallest
        self.place: Place = HostMemory(device) if device.type == "cuda" else ActivationFile(folder)

    @contextmanager
    def offload(self, weights: Iterable[Tensor], batch: Mapping[str, object]) -> Iterator[None]:
        """Offloads what is saved within the context, which is one forward pass.

        Args:
            weights: Parameters and buffers of the model, which stay.
            batch: Its tensors stay, those of its signals too.
        """
        resident = {StorageWeakRef(_find_local(each).untyped_storage()) for each in (*weights, *_find_tensors(batch))}
        packer = _Packer(self.place, self.device.type, self.smallest, resident)
        try:
            with saved_tensors_hooks(packer.pack, _unpack):
                yield
        finally:
            self.place.finish_forward()


class _Packer:
    """Stores each storage of a forward pass once.

    Entries are found by a weak reference to the storage. While one exists, no other storage gets the same address.
    """

    def __init__(self, place: Place, device_type: str, smallest: int, resident: set[StorageWeakRef]):
        self.place, self.device_type, self.smallest, self.resident = place, device_type, smallest, resident
        self.stored: dict[StorageWeakRef, tuple[int, ReferenceType[StoredBytes]]] = {}  # with the tensor's version

    def pack(self, tensor: Tensor) -> Tensor | SavedView:
        """Returns what autograd keeps in place of the tensor."""
        local = _find_local(tensor)
        if not self._leaves(tensor, local):
            # An output that refers to its own node would never be freed.
            return tensor if tensor.is_leaf else tensor.detach()
        return SavedView(
            self._store(local),
            local.dtype,
            local.size(),
            local.stride(),
            int(local.storage_offset()),
            ShardedView.of(tensor) if isinstance(tensor, DTensor) else None,
        )

    def _leaves(self, tensor: Tensor, local: Tensor) -> bool:
        if type(local) is not Tensor or local.layout != torch.strided or local.device.type != self.device_type:
            return False  # subclasses with a memory of their own kind, or parameters
        # FSDP's gathered weights aren't among the parameters before the pass.
        if _is_trained(tensor) or (tensor._base is not None and _is_trained(tensor._base)):
            return False
        storage = local.untyped_storage()
        if local.is_inference() or local.is_conj() or local.is_neg() or storage.nbytes() < self.smallest:
            return False
        return StorageWeakRef(storage) not in self.resident

    def _store(self, local: Tensor) -> StoredBytes:
        storage = local.untyped_storage()
        key = StorageWeakRef(storage)
        version, reference = self.stored.get(key, (-1, None))
        stored = None if reference is None or version != local._version else reference()
        if stored is None:
            content = torch.empty(0, dtype=torch.uint8, device=local.device)
            stored = self.place.store(content.set_(storage))
            self.stored[key] = (local._version, ref(stored))
        return stored


def _unpack(packed: Tensor | SavedView) -> Tensor:
    return packed.load() if isinstance(packed, SavedView) else packed


def _is_trained(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or (tensor.is_leaf and tensor.requires_grad)


def _find_local(tensor: Tensor) -> Tensor:
    """Returns the local part of a sharded tensor, and any other tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _find_tensors(value: object) -> Iterator[Tensor]:
    """Yields the tensors in nested mappings and sequences."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _find_tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _find_tensors(each)
