"""Layouts of a model on the processes of a run: parsed from text and checked without importing torch."""

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from distill.checkpoint.stock_type import PRUNED
from distill.errors import InputError

if TYPE_CHECKING:  # transformers imports torch
    from transformers import PretrainedConfig

AXES: Final = ("pp", "dp", "fsdp", "cp", "tp")  # outermost first: ranks of a cp or a tp group are adjacent
_ATTENTION_KINDS: Final = ("full_attention", "sliding_attention", "chunked_attention")  # of layers in configs
_SYNTAX: Final = (
    "replicated, zero1, zero2, fsdp=N (or zero3), hsdp=RxS, tp=N, pp=N, cp=N, dp=N with tp, pp or cp, fsdp=N with tp=M "
    "or cp=M, or auto"
)


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes that a model is distributed over; their product is the number of processes.

    Args:
        pp: Number of pipeline stages, each with some of the layers.
        dp: Number of replicas, each with different data.
        fsdp: Number of shards of every weight, each on a process with different data (FSDP2; ZeRO-3).
        cp: Number of segments that the positions of each row are divided into (context parallelism).
        tp: Number of shards of every matrix product, all with the same data.
        zero: What is sharded over replicas whose weights are not: 1 the optimizer state, 2 also the gradients.
    """

    pp: int = 1
    dp: int = 1
    fsdp: int = 1
    cp: int = 1
    tp: int = 1
    zero: int = 0

    @property
    def processes(self) -> int:
        """Number of processes."""
        return self.pp * self.dp * self.fsdp * self.cp * self.tp

    @property
    def data_parallel(self) -> int:
        """Number of shares that the rows of a batch are split into."""
        return self.dp * self.fsdp

    @property
    def shards(self) -> int:
        """Number of parts that the weights are split into; FSDP uses the processes of all segments of a row too."""
        return self.pp * self.fsdp * self.tp * (self.cp if self.fsdp > 1 else 1)

    @property
    def sharded(self) -> bool:
        """Whether each process has only a part of the weights."""
        return self.shards > 1

    @property
    def shards_gradients(self) -> bool:
        """Whether each process keeps only a part of the gradients: those of its weights, or its share in ZeRO 2."""
        return self.sharded or self.zero == 2

    @property
    def uses_fsdp(self) -> bool:
        """Whether FSDP2 wraps the layers: for shards, for ZeRO 2, and for the gradients of replicas with tp."""
        return self.fsdp > 1 or self.zero == 2 or (self.tp > 1 and self.dp > 1)

    def __str__(self) -> str:
        if self.zero:
            return f"zero{self.zero}"
        if self.dp > 1 and self.fsdp > 1:
            rest = [f",{axis}={getattr(self, axis)}" for axis in ("cp", "tp") if getattr(self, axis) > 1]
            return f"hsdp={self.dp}x{self.fsdp}{''.join(rest)}"
        sizes = [f"{axis}={getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        return "replicated" if not self.sharded and self.cp == 1 else ",".join(sizes)


def parse_layout(text: str, processes: int, name: str = "layout") -> Layout:
    """Returns the layout described by `text` for `processes` processes.

    Here `auto` is `fsdp` over all of them; that of the settings is resolved before.

    Raises:
        InputError: The text can't be parsed, the axes can't be combined, or their product isn't the number of
            processes.
    """
    layout = _parse_axes(text, processes, name)
    if layout.processes != processes:
        sizes = [str(getattr(layout, axis)) for axis in AXES if getattr(layout, axis) > 1]
        product = f"{' x '.join(sizes)} = {layout.processes}" if len(sizes) > 1 else str(layout.processes)
        raise InputError(
            f"{name} {text!r}: expected {product} processes, found {processes}: start {layout.processes} (--devices "
            "or torchrun), or choose another layout"
        )
    if layout.cp > 1 and layout.pp * layout.tp > 1:
        raise InputError(
            f"{name} {text!r}: expected cp with dp or fsdp only, found {'tp' if layout.tp > 1 else 'pp'}: tp divides "
            "the heads that cp exchanges for positions, and pipeline stages send each other whole rows; leave one out"
        )
    if layout.pp > 1 and layout.fsdp * layout.tp > 1:
        raise InputError(
            f"{name} {text!r}: expected pp with dp only, found fsdp or tp: a stage's weights would be gathered or "
            f"reduced for every micro-batch; use pp={layout.processes}, or fsdp and tp without pp"
        )
    return layout


def _parse_axes(text: str, processes: int, name: str) -> Layout:
    """Parses a layout without checking the product of its axes.

    Raises:
        InputError: The text can't be parsed, or an axis occurs twice.
    """
    spec = text.strip().lower()
    if spec in ("auto", "zero3", "fsdp"):
        return Layout(fsdp=processes)
    if spec == "replicated":
        return Layout(dp=processes)
    if spec in ("zero1", "zero2"):
        return Layout(dp=processes, zero=int(spec[-1])) if processes > 1 else Layout()
    sizes: dict[str, int] = {}
    for part in spec.split(","):
        axis, _, value = part.strip().partition("=")
        axes = _parse_hybrid(value) if axis == "hsdp" else {axis: value}
        if axes is None or not all(key in AXES and re.fullmatch(r"[1-9]\d*", size) for key, size in axes.items()):
            raise InputError(f"{name} {text!r}: expected {_SYNTAX}, found {part.strip()!r}")
        repeated = sizes.keys() & axes.keys()
        if repeated:
            raise InputError(f"{name} {text!r}: expected each axis once, found {', '.join(sorted(repeated))} twice")
        sizes |= {key: int(size) for key, size in axes.items()}
    return Layout(**sizes)


def _parse_hybrid(value: str) -> dict[str, str] | None:
    replicas, separator, shards = value.partition("x")
    return {"dp": replicas, "fsdp": shards} if separator else None


def check_layout_fits(layout: Layout, heads: int, kv_heads: int, layers: int, name: str) -> None:
    """Checks that a model of these sizes can have the layout.

    Raises:
        InputError: The heads can't be divided over tp or cp, or there are more pipeline stages than layers.
    """
    for kind, count in (("attention heads", heads), ("key and value heads", kv_heads)):
        for axis, size in (("tp", layout.tp), ("cp", layout.cp)):
            if count % size:
                raise InputError(
                    f"{name} {axis}={size}: expected a divisor of the model's {count} {kind}: they can't be divided "
                    f"evenly; {axis} may be {_list_divisors(math.gcd(heads, kv_heads))}"
                )
    if layout.pp > max(1, layers):
        raise InputError(
            f"{name} pp={layout.pp}: expected at most {layers} stages, the model's number of layers: a stage would be "
            "empty"
        )


def check_model_fits(layout: Layout, config: "PretrainedConfig", name: str) -> None:
    """Checks that the model of a transformers config can have the layout.

    Raises:
        InputError: As in `check_layout_fits`, or positions meet elsewhere than in attention that cp can replace.
    """
    text_config = config.get_text_config()
    obstacle = find_exchange_obstacle(config) if layout.cp > 1 else ""
    if obstacle:
        raise InputError(
            f"{name} cp={layout.cp}: expected a model whose positions meet in attention alone, by the sdpa of "
            f"transformers, found {config.model_type}, {obstacle}: a segment of a text would not see the others; use "
            "fsdp=N"
        )
    heads, layers = text_config.num_attention_heads, text_config.num_hidden_layers
    check_layout_fits(layout, heads, getattr(text_config, "num_key_value_heads", None) or heads, layers, name)


def find_exchange_obstacle(config: "PretrainedConfig") -> str:
    """Returns why the attention of a model can't exchange heads for positions; empty if its config shows no reason."""
    from transformers import AutoModel

    text_config = config.get_text_config()
    stock = AutoModel._model_mapping.get(type(config), None)
    kinds = {*(getattr(text_config, "layer_types", None) or ())} - set(_ATTENTION_KINDS)
    if config.is_encoder_decoder:
        return "with an encoder and a decoder"
    if not isinstance(stock, type) or config.model_type.startswith(PRUNED):
        return "no stock class, whose layers may have different heads"
    if not stock._supports_attention_backend:
        return "with attention of its own, as relative positions need"
    if not stock._supports_sdpa or getattr(text_config, "attn_logit_softcapping", None):
        return "whose scores are capped or have sinks"
    if kinds:
        return f"with layers of {', '.join(sorted(kinds))}"
    if getattr(text_config, "position_embedding_type", None) in ("relative_key", "relative_key_query"):
        return "with relative positions"
    return "whose embeddings join neighboring tokens" if getattr(text_config, "trigram_input", False) else ""


def _list_divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
