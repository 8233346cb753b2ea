"""How a model lies on the processes of a run: a line of text, read and checked without torch."""

import math
import re
from dataclasses import dataclass
from typing import Any, Final

from distill.errors import InputError

AXES: Final = ("pp", "dp", "fsdp", "tp")  # outermost first: neighbours in a tensor group are neighbours in the world
FORMS: Final = (
    "replicated, zero1, zero2, fsdp=N (or zero3), hsdp=RxS, tp=N, pp=N, dp=N with tp or pp, fsdp=N,tp=M, or auto"
)


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes that a model is laid out on; their product is the number of processes.

    Args:
        pp: Stages that follow one another, each with some of the layers.
        dp: Copies, each with other data.
        fsdp: Parts that every weight is cut into, each part's process with other data (FSDP2; ZeRO-3).
        tp: Parts that every matrix product is cut into, all with the same data.
        zero: What of a copy is cut where the weights aren't: 1 the optimizer's state, 2 the gradients too.
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
        """Shares that a batch is cut into."""
        return self.dp * self.fsdp

    @property
    def sharded(self) -> bool:
        """Whether a process holds less than all weights."""
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
    """The layout that `text` names for `processes` processes; `auto` is `fsdp` over all of them.

    Raises:
        InputError: Unknown words, axes that don't go together, or a product that isn't the number of processes.
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
    """The layout as it is written; the product isn't checked."""
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
    """Raises InputError where a model of these sizes can't lie so."""
    for what, size in (("attention heads", heads), ("key and value heads", kv_heads)):
        if size % layout.tp:
            raise InputError(
                f"{name} tp={layout.tp}: the model's {size} {what} can't be shared out evenly; tp may be "
                f"{divisors(math.gcd(heads, kv_heads))}"
            )
    if layout.pp > layers:
        raise InputError(f"{name} pp={layout.pp}: the model has {layers} layers, fewer than stages")


def fitting_model(layout: Layout, config: Any, name: str) -> None:
    """`fitting` for the sizes in a model's transformers config."""
    own = config.get_text_config()
    heads = own.num_attention_heads
    fitting(layout, heads, getattr(own, "num_key_value_heads", None) or heads, own.num_hidden_layers, name)


def divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
