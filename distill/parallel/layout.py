"""Layouts of a model on the processes of a run: parsed from text and checked without importing torch."""

import math
import re
from dataclasses import dataclass
from typing import Any, Final

from distill.errors import InputError

AXES: Final = ("pp", "dp", "fsdp", "tp")  # outermost first: ranks of a tensor-parallel group are adjacent
FORMS: Final = (
    "replicated, zero1, zero2, fsdp=N (or zero3), hsdp=RxS, tp=N, pp=N, dp=N with tp or pp, fsdp=N,tp=M, or auto"
)


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes that a model is distributed over; their product is the number of processes.

    Args:
        pp: Number of pipeline stages, each with some of the layers.
        dp: Number of replicas, each with different data.
        fsdp: Number of shards of every weight, each on a process with different data (FSDP2; ZeRO-3).
        tp: Number of shards of every matrix product, all with the same data.
        zero: What is sharded over replicas whose weights are not: 1 the optimizer state, 2 also the gradients.
    """

    pp: int = 1
    dp: int = 1
    fsdp: int = 1
    tp: int = 1
    zero: int = 0

    @property
    def processes(self) -> int:
        return self.pp * self.dp * self.fsdp * self.tp

    @property
    def data_parallel(self) -> int:
        """Number of shares that a batch is split into."""
        return self.dp * self.fsdp

    @property
    def sharded(self) -> bool:
        """Whether each process has only a part of the weights."""
        return self.pp * self.fsdp * self.tp > 1

    def __str__(self) -> str:
        if self.zero:
            return f"zero{self.zero}"
        if self.dp > 1 and self.fsdp > 1:
            rest = f",tp={self.tp}" if self.tp > 1 else ""
            return f"hsdp={self.dp}x{self.fsdp}{rest}"
        sizes = [f"{axis}={getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        return "replicated" if not self.sharded else ",".join(sizes)


def parse_layout(text: str, processes: int, name: str = "layout") -> Layout:
    """Returns the layout described by `text` for `processes` processes; `auto` is `fsdp` over all of them.

    Raises:
        InputError: The text can't be parsed, the axes can't be combined, or their product isn't the number of
            processes.
    """
    layout = read_layout(text, processes, name)
    if layout.processes != processes:
        sizes = " x ".join(str(getattr(layout, axis)) for axis in AXES if getattr(layout, axis) > 1) or "1"
        raise InputError(
            f"{name} {text!r}: needs {sizes} = {layout.processes} processes, found {processes}: start "
            f"{layout.processes} (--devices, or torchrun), or write another layout"
        )
    if layout.pp > 1 and layout.fsdp * layout.tp > 1:
        raise InputError(
            f"{name} {text!r}: pp goes with dp only: a stage's weights would be gathered or reduced for every "
            f"micro-batch; use pp={layout.processes}, or fsdp and tp without pp"
        )
    return layout


def read_layout(text: str, processes: int, name: str) -> Layout:
    """Parses a layout without checking the product of its axes.

    Raises:
        InputError: The text can't be parsed, or an axis is given twice.
    """
    word = text.strip().lower()
    if word in ("auto", "zero3", "fsdp"):
        return Layout(fsdp=processes)
    if word == "replicated":
        return Layout(dp=processes)
    if word in ("zero1", "zero2"):
        return Layout(dp=processes, zero=int(word[-1])) if processes > 1 else Layout()
    sizes: dict[str, int] = {}
    for part in word.split(","):
        axis, _, value = part.strip().partition("=")
        found = hybrid(value) if axis == "hsdp" else {axis: value}
        if found is None or not all(key in AXES and re.fullmatch(r"[1-9]\d*", size) for key, size in found.items()):
            raise InputError(f"{name} {text!r}: expected {FORMS}; found {part.strip()!r}")
        twice = sizes.keys() & found.keys()
        if twice:
            raise InputError(f"{name} {text!r}: {', '.join(sorted(twice))} is given twice")
        sizes |= {key: int(size) for key, size in found.items()}
    return Layout(**sizes)


def hybrid(value: str) -> dict[str, str] | None:
    copies, times, parts = value.partition("x")
    return {"dp": copies, "fsdp": parts} if times else None


def fitting(layout: Layout, heads: int, kv_heads: int, layers: int, name: str) -> None:
    """Checks that a model of these sizes can have the layout.

    Raises:
        InputError: The heads can't be divided over tp, or there are more pipeline stages than layers.
    """
    for what, size in (("attention heads", heads), ("key and value heads", kv_heads)):
        if size % layout.tp:
            raise InputError(
                f"{name} tp={layout.tp}: the model's {size} {what} can't be shared out evenly; tp may be "
                f"{divisors(math.gcd(heads, kv_heads))}"
            )
    if layout.pp > layers:
        raise InputError(f"{name} pp={layout.pp}: the model has {layers} layers, fewer than stages")


def fitting_model(layout: Layout, config: Any, name: str) -> None:
    """Calls `fitting` with the sizes in a model's transformers config."""
    own = config.get_text_config()
    heads = own.num_attention_heads
    fitting(layout, heads, getattr(own, "num_key_value_heads", None) or heads, own.num_hidden_layers, name)


def divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
