"""The work and the traffic of a step, counted operator by operator."""

import math
import weakref
from collections import Counter
from dataclasses import astuple, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

SPACES = ("c10d", "_c10d_functional")
BROADCAST = "broadcast"  # of updated weights after an optimizer's step, by ZeRO 1
RESHAPING = ("_unsafe_view",)  # views that don't say so
LOOKUPS = ("embedding", "index", "index_select", "gather")  # they read as much of their table as they return


@dataclass(frozen=True)
class Collective:
    """A kind of collective operation.

    Args:
        kind: Name of the operation, such as all_reduce.
        ranks: The processes that take part.
        waits: Whether the next operator needs the result, as in tensor parallelism; FSDP's run beside others.
    """

    kind: str
    ranks: tuple[int, ...]
    waits: bool


@dataclass(frozen=True)
class OperatorWork:
    """What the operators of a process do, but for what they send.

    Args:
        flops: Floating-point operations.
        bytes_accessed: Bytes that operators other than products and collectives read and write.
        drawn: Random numbers, for dropout on a CPU.
        sharded: Number of operators on sharded tensors.
    """

    flops: int = 0
    bytes_accessed: int = 0
    drawn: int = 0
    sharded: int = 0

    def add(self, other: "OperatorWork", times: float = 1.0) -> "OperatorWork":
        """Returns the sum of this work and a multiple of another's."""
        counts = (round(count + times * added) for count, added in zip(astuple(self), astuple(other), strict=True))
        return OperatorWork(*counts)


class WorkCounter(TorchDispatchMode):
    """Counts a process's floating-point operations and what it sends.

    `FlopCounterMode` counts the same work, but for all processes of a sharded product together, and it keeps
    activations in memory that a training frees.

    Args:
        classes: Size of the logits' last dimension, as on this process.

    Attributes:
        flops: Floating-point operations.
        bytes_accessed: Bytes that operators other than products and collectives read and write.
        drawn: Random numbers, for dropout.
        sharded: Number of operators on sharded tensors.
        sent: Collective -> bytes of its results.
        calls: Collective -> how often it is called.
        logits: Bytes of the tensors that are as wide as the logits and in use now.
        scattered: Bytes of the input of the operator that ran last, if it was a reduce-scatter.
    """

    def __init__(self, classes: int = 0) -> None:
        super().__init__()
        self.classes, self.flops, self.logits, self.scattered = classes, 0, 0, 0
        self.bytes_accessed, self.drawn, self.sharded = 0, 0, 0
        self.sent, self.calls = Counter[Collective](), Counter[Collective]()
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary(ref_type=weakref.ref)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs an operator and counts it; one of a sharded tensor comes back as that of this process's part."""
        if asks_device(function, args):
            return args[0].fake_device
        if any(issubclass(each, DTensor) for each in types):
            self.sharded += 1
            return NotImplemented
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        packet = getattr(function, "_overloadpacket", None)
        if packet in flop_registry:
            self.flops += flop_registry[packet](*args, **kwargs, out_val=result)
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        space, _, rest = str(function).partition(".")
        name = rest.partition(".")[0]
        self.scattered = 0
        if space in SPACES and not name.startswith(("wait", "_wrap")):
            kind = name.strip("_")
            key = Collective(kind, find_ranks(args, kwargs), kind == BROADCAST or space == SPACES[1])
            size = sum(leaf.numel() * leaf.element_size() for leaf in tensors)
            self.sent[key] += size
            self.calls[key] += 1
            if key.kind.startswith("reduce_scatter"):
                self.scattered = size * len(key.ranks)
        elif name.startswith("bernoulli"):
            self.drawn += sum(leaf.numel() for leaf in tensors)
        elif packet not in flop_registry and not getattr(function, "is_view", False) and name not in RESHAPING:
            self.bytes_accessed += count_bytes_accessed(name, (args, kwargs), tensors)
        if self.classes:
            self._watch_logits(tensors)
        return result

    @property
    def work(self) -> OperatorWork:
        """What was counted, but for what is sent."""
        return OperatorWork(self.flops, self.bytes_accessed, self.drawn, self.sharded)

    def _watch_logits(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            if tensor.dim() < 2 or tensor.shape[-1] != self.classes or not tensor.is_floating_point():
                continue
            storage = tensor.untyped_storage()
            if storage not in self._known:
                self._known[storage] = size = storage.nbytes()
                self.logits += size
                weakref.finalize(storage, self._forget, size)

    def _forget(self, size: int) -> None:
        self.logits -= size


def asks_device(function: Any, args: tuple[Any, ...]) -> bool:
    """Returns whether an operator only asks for the device of a fake tensor, which may be answered at once."""
    is_asked = function is torch.ops.prim.device.default and isinstance(args[0], FakeTensor)
    return is_asked and not args[0].fake_mode.in_kernel_invocation  # where it counts as a tensor on meta


def count_bytes_accessed(name: str, inputs: object, outputs: list[Tensor]) -> int:
    """Returns the bytes that the operator of this name reads and writes; new tensors without values take none."""
    if name.startswith(("empty", "new_empty")):
        return 0
    written = sum(map(count_value_bytes, outputs))
    read = [count_value_bytes(leaf) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    return written + sum(min(size, written) if name in LOOKUPS else size for size in read)


def count_value_bytes(tensor: Tensor) -> int:
    """Returns the bytes of a tensor's values, each once, though it may show them several times."""
    shown = [count for count, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return math.prod(shown) * tensor.element_size()


def find_ranks(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Returns the processes of the group in a collective operation's arguments."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.ScriptObject):
            return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(value)))
    names = [value for value in (*args, *kwargs.values()) if isinstance(value, str)]
    group = dist.distributed_c10d._resolve_process_group(names[-1])  # type: ignore[arg-type]
    return tuple(dist.get_process_group_ranks(group))
