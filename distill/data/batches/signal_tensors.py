"""The tensors inside a teacher's signals, which may be nested: of layers, or of parts of a distribution."""

from collections.abc import Callable, Mapping

from torch import Tensor


def map_tensors(signal: object, take: Callable[[Tensor], object]) -> object:
    """Returns the signal with `take` applied to each of its tensors; numbers and other values stay as they are.

    Args:
        signal: A tensor, a scalar, or mappings, tuples and lists of them.
        take: Called with each tensor of one or more dimensions.
    """
    if isinstance(signal, Tensor):
        return take(signal) if signal.dim() else signal
    if isinstance(signal, Mapping):
        return {name: map_tensors(each, take) for name, each in signal.items()}
    if isinstance(signal, tuple | list):
        return type(signal)(map_tensors(each, take) for each in signal)
    return signal
