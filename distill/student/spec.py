"""Parsing of `--student`: a preset, sizes relative to the teacher, or a separate checkpoint."""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Literal

from distill.errors import InputError
from distill.slicing.spacing import space_layers_evenly
from distill.student.norms import check_kind

_WIDTHS = ("hidden", "heads", "ffn")
KEYS = ("layers", *_WIDTHS, "embeddings")
BLOCK_KEYS = (*KEYS, "inner", "stacks")  # for bottleneck students
VECTOR_KEYS = ("embeddings", "hidden", "layers", "kernel", "ngrams", "positions")  # for students without attention
FRESH = "fresh"
NORM_KEY = "norm"
POOLING_KEY = "pooling"
POOLING_KINDS = ("mean", "weighted", "max", "order")
NEAR = 0.75  # similarity of a misspelt preset; no hub name without a slash is this close to a preset


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model: selected layers of the teacher, and widths.

    Args:
        layers: Numbers of the teacher's layers, in the student's order.
        hidden: Width of the hidden states.
        heads: Attention heads per layer.
        ffn: Feed-forward neurons per layer.
        kv: Number of key-value heads shared by the attention heads; 0: each head has its own.
        head: Width of a head if it can't change; 0: hidden / heads.
        free: Heads need not fill the hidden width.
        embeddings: Width of the token embeddings; 0: hidden.
    """

    layers: tuple[int, ...]
    hidden: int
    heads: int
    ffn: int
    kv: int = 0
    head: int = 0
    free: bool = False
    embeddings: int = 0

    @property
    def head_width(self) -> int:
        """The width of one head."""
        return self.head or self.hidden // self.heads

    @property
    def groups(self) -> int:
        """Number of key-value heads."""
        return self.kv or self.heads


@dataclass(frozen=True)
class StudentConfig:
    """The student to train.

    Args:
        spec: A hub id or folder; a preset (distilbert: every second layer; half: half of every width; tinybert4,
            tinybert6, minilm-l6-h384: sized relative to the teacher as these models are to BERT-base; mobilebert,
            mobilebert-tiny: bottleneck blocks; inverted-bottleneck: a teacher for these; static, cnn, gru: token
            embeddings without attention; teacher: the entire teacher); sizes such as `layers=2`, `layers=0,2,5` or
            `layers=3,hidden=192,heads=6,ffn=768`, also after a preset; `fresh` before them for random weights; `norm=`
            layernorm, rmsnorm, nonorm or batchnorm among the sizes for another normalization. If omitted, distilbert,
            or teacher if a budget determines the pruning.
        layout: Layout on the processes: replicated, zero1, zero2, fsdp=N, hsdp=RxS, tp=N, fsdp=N,tp=M, dp=N,tp=M, pp=N,
            pp=N,dp=M; for long texts cp=N, dp=N,cp=M, fsdp=N,cp=M; auto is replicated where training either model takes
            at most half of a process's memory, otherwise that of the fastest pair as `pipelines.plan` predicts it.
        trained: The student is already trained and is used unchanged; `spec` is then teacher or a checkpoint.
        offload: With FSDP, keep weights, gradients and optimizer state in CPU memory.
        attention_free: Students without attention to train as well, as specs separated by semicolons, such as
            `static;cnn,hidden=128`; if omitted with `budget.frontier`, several of each kind that can do the task.
        stages: How layers are divided among pipeline stages: size minimizes the parameters of the largest stage; time
            minimizes the time of the slowest one, as measured on its parts.
    """

    spec: str = ""
    layout: str = "auto"
    trained: bool = False
    offload: bool = False
    attention_free: str = ""
    stages: Literal["size", "time"] = "size"


@dataclass(frozen=True)
class Shares:
    """Student sizes as shares of the teacher's; `layers` None selects every second layer."""

    layers: Fraction | None = Fraction(1)
    hidden: Fraction = Fraction(1)
    heads: Fraction = Fraction(1)
    ffn: Fraction = Fraction(1)

    def of(self, teacher: Sizes) -> Sizes:
        """Returns the sizes that this name stands for, from those of the teacher."""
        total = len(teacher.layers)
        layers = (
            teacher.layers[::2]
            if self.layers is None
            else select_layers_evenly(max(1, round(total * self.layers)), teacher)
        )
        heads = max(1, int(teacher.heads * self.heads))
        # Heads must divide the width that they fill.
        hidden = max(1, round(teacher.hidden * self.hidden / heads)) * heads
        return with_heads(
            replace(teacher, layers=layers, hidden=hidden, ffn=int(teacher.ffn * self.ffn)), heads, teacher
        )


# Shares of BERT-base (12 layers, 768 wide, 12 heads, 3,072 neurons) as in the papers: TinyBERT4 is 4 x 312 with 12
# heads and 1,200 neurons, TinyBERT6 6 x 768 (arXiv 1909.10351, section 4.2); MiniLM-L6-H384 6 x 384 with 12 heads
# (arXiv 2002.10957, section 4.1).
HALF = Fraction(1, 2)
SHARE_PRESETS = {
    "distilbert": Shares(layers=None),
    "half": Shares(hidden=HALF, heads=HALF, ffn=HALF),
    "tinybert4": Shares(Fraction(1, 3), Fraction(312, 768), ffn=Fraction(1200, 3072)),
    "tinybert6": Shares(HALF),
    "minilm-l6-h384": Shares(HALF, HALF, ffn=HALF),
    "teacher": Shares(),
}
BLOCKS = ("mobilebert", "mobilebert-tiny", "inverted-bottleneck")
VECTOR_PRESETS = ("static", "cnn", "gru")  # over vectors of tokens, without attention
DEFAULT_POOLING = {"static": ("weighted",), "cnn": ("mean", "max"), "gru": ("mean", "max")}
PRESETS = (*SHARE_PRESETS, *BLOCKS, *VECTOR_PRESETS)


@dataclass(frozen=True)
class StudentSpec:
    """A parsed spec relative to the teacher.

    Args:
        text: The spec.
        preset: Its preset; empty without one.
        fresh: The weights are random.
        requested: Its explicit sizes.
        norm: Kind of normalization; empty for that of the stock class.
        pooling: How a student without attention combines the vectors of a text; empty for the default.
    """

    text: str
    preset: str
    fresh: bool
    requested: dict[str, tuple[int, ...]]
    norm: str = ""
    pooling: tuple[str, ...] = ()

    @property
    def is_bottleneck(self) -> bool:
        """Whether the student consists of bottleneck blocks."""
        return self.preset in BLOCKS

    @property
    def is_vectors(self) -> bool:
        """Whether the student consists of token vectors without attention."""
        return self.preset in VECTOR_PRESETS


def is_relative(spec: str) -> bool:
    """Returns whether the spec is relative to the teacher; otherwise it is a checkpoint.

    No size contains a slash. A folder whose name contains `=` is a checkpoint unless the name is also a valid spec: a
    run may be written to a folder called `layers=2` while it uses the spec.
    """
    if "=" in spec and "/" not in spec:
        return is_readable(spec) or not is_folder(spec)
    return spec.split(",")[0].strip() in (*PRESETS, FRESH)


def near_preset(name: str) -> str:
    """Returns the preset that `name` probably misspells; empty if `name` is a preset or similar to none."""
    near = difflib.get_close_matches(name, PRESETS, 1, cutoff=NEAR)
    return near[0] if near and name not in PRESETS else ""


def is_attention_free(spec: str) -> bool:
    """Returns whether a spec describes a student without attention: static, cnn or gru."""
    return is_relative(spec) and parse_spec(spec).is_vectors


def check_spec(spec: str) -> None:
    """Checks the syntax of a spec; `resolve_sizes` checks its sizes against the teacher's.

    Raises:
        InputError: The spec can't be parsed, the name of a preset is misspelt, or a checkpoint is to have another kind
            of normalization.
    """
    checkpoint = re.split(rf",\s*{NORM_KEY}\s*=", spec)[0]
    if checkpoint != spec and not is_relative(checkpoint) and not is_folder(spec):
        raise InputError(
            f"student {spec!r}: expected norm= after sizes or a preset only, found it after {checkpoint!r}: a trained "
            "checkpoint keeps its normalization"
        )
    if is_relative(spec):
        parse_spec(spec)
        return
    first = spec.split(",")[0].strip()
    near = near_preset(first)
    if near and "/" not in spec and not is_folder(spec):
        raise InputError(
            f"student {spec!r}: expected a folder, a hub id or one preset among {', '.join(PRESETS)}, found neither; "
            f"did you mean {near!r}?"
        )


def read_norm(spec: str) -> str:
    """Returns the kind of normalization that a spec requests; empty for a checkpoint, and if it requests none."""
    return parse_spec(spec).norm if is_relative(spec) else ""


def is_folder(spec: str) -> bool:
    """Returns whether a folder with this name exists; False for a name that is too long for a path."""
    try:
        return Path(spec).is_dir()
    except OSError:
        return False


def is_readable(spec: str) -> bool:
    """Returns whether the text is a valid specification of a student."""
    try:
        parse_spec(spec)
    except InputError:
        return False
    return True


def parse_spec(spec: str) -> StudentSpec:
    """Parses a relative spec.

    Raises:
        InputError: The preset, a key or a kind of normalization is unknown, a key is given twice, or a size isn't a
            number.
    """
    parts = re.split(r",(?=[^,=]+=)", spec)
    named = [] if "=" in parts[0] else [each.strip() for each in parts.pop(0).split(",")]
    fresh = FRESH in named
    presets = [each for each in named if each != FRESH]
    if len(presets) > 1 or named.count(FRESH) > 1 or any(each not in PRESETS for each in presets):
        raise InputError(
            f"student {spec!r}: expected one preset among {', '.join(PRESETS)}, found {','.join(presets or named)}"
            + "".join(f"; did you mean {near!r}?" for near in [*map(near_preset, presets)][:1] if near)
        )
    preset = presets[0] if presets else ""
    values = split_values(spec, parts, list_keys(preset))
    norm, pooling = values.pop(NORM_KEY, None), values.pop(POOLING_KEY, None)
    if norm is not None:
        check_kind(norm, spec)
    requested = {key: parse_numbers(spec, key, value) for key, value in values.items()}
    kinds = () if pooling is None else parse_pooling(spec, pooling)
    return StudentSpec(spec, preset, fresh, requested, norm or "", kinds)


def list_keys(preset: str) -> tuple[str, ...]:
    """Returns the keys that may follow a preset."""
    if preset in VECTOR_PRESETS:
        return (*VECTOR_KEYS, POOLING_KEY)
    return (*(BLOCK_KEYS if preset in BLOCKS else KEYS), NORM_KEY)


def split_values(spec: str, parts: Sequence[str], keys: Sequence[str]) -> dict[str, str]:
    """Returns key -> value of `key=value` parts.

    Raises:
        InputError: A key is unknown, or is given twice.
    """
    values: dict[str, str] = {}
    for part in parts:
        key, _, value = (each.strip() for each in part.partition("="))
        if key not in keys:
            raise InputError(f"student {spec!r}: expected {', '.join(keys)}, found {key!r}")
        if key in values:
            raise InputError(f"student {spec!r}: {key} is given twice: its meaning is ambiguous")
        values[key] = value
    return values


def parse_numbers(spec: str, key: str, value: str) -> tuple[int, ...]:
    """Returns the numbers of a value.

    Raises:
        InputError: It isn't a number, or for `layers` numbers separated by commas.
    """
    if not re.fullmatch(r"\d{1,9}(\s*,\s*\d{1,9})*", value):
        raise InputError(f"student {spec!r}: expected numbers after {key}=, found {value!r}")
    numbers = tuple(int(number) for number in value.split(","))
    if key != "layers" and len(numbers) != 1:
        raise InputError(f"student {spec!r}: expected one number for {key}, found {value!r}")
    return numbers


def parse_pooling(spec: str, value: str) -> tuple[str, ...]:
    """Returns the kinds of pooling in `mean+max`.

    Raises:
        InputError: A kind is unknown, or is named twice.
    """
    kinds = tuple(each.strip() for each in value.split("+"))
    if len({*kinds}) < len(kinds) or not {*kinds} <= {*POOLING_KINDS}:
        raise InputError(
            f"student {spec!r}: expected pooling={' or '.join(POOLING_KINDS)}, or several as mean+max, found {value!r}"
        )
    return kinds


def resolve_sizes(spec: str, teacher: Sizes) -> Sizes:
    """Returns the sizes of the student that `spec` requests.

    For a bottleneck student they are those of the residual stream between its blocks.

    Raises:
        InputError: A key is unknown, or a size isn't a number, is larger than the teacher's or isn't divisible as
            required.
    """
    parsed = parse_spec(spec)
    sizes = with_layers(parsed, SHARE_PRESETS.get(parsed.preset, Shares()).of(teacher), teacher)
    requested = {key: numbers[0] for key, numbers in parsed.requested.items() if key in ("hidden", "ffn", "embeddings")}
    sizes = replace(sizes, **requested)  # type: ignore[arg-type]
    heads = sizes.heads
    if "heads" in parsed.requested:
        heads = parsed.requested["heads"][0]
    elif "hidden" in parsed.requested and not teacher.free:
        heads = max(1, sizes.hidden * teacher.heads // teacher.hidden)
    if heads != sizes.heads:
        sizes = with_heads(sizes, heads, teacher)
    return check_sizes(sizes, teacher, fresh=parsed.fresh)


def with_layers(parsed: StudentSpec, sizes: Sizes, teacher: Sizes) -> Sizes:
    """Returns the sizes with the requested layers, or else unchanged."""
    numbers = parsed.requested.get("layers")
    if not numbers:
        return sizes
    if len(numbers) > 1:
        return replace(sizes, layers=numbers)
    # Randomly initialized layers don't come from the teacher, so their number may exceed the teacher's.
    return replace(
        sizes, layers=tuple(range(numbers[0])) if parsed.fresh else select_layers_evenly(numbers[0], teacher)
    )


def with_heads(sizes: Sizes, heads: int, teacher: Sizes) -> Sizes:
    """Returns the sizes with the given number of heads.

    Whole groups that share keys and values are dropped, or else the same number of heads in each group.

    Raises:
        InputError: The number of heads permits neither.
    """
    if not teacher.kv:
        return replace(sizes, heads=heads)
    each = teacher.heads // teacher.kv
    if heads % each == 0 and heads // each <= teacher.kv:
        return replace(sizes, heads=heads, kv=heads // each)
    if heads % teacher.kv == 0:
        return replace(sizes, heads=heads, kv=teacher.kv)
    raise InputError(
        f"student heads={heads}: expected a multiple of {each}, whole groups, or of {teacher.kv}, as many of each "
        f"group: {teacher.heads} heads of the teacher share {teacher.kv} keys and values"
    )


def select_layers_evenly(count: int, teacher: Sizes) -> tuple[int, ...]:
    """Returns `count` evenly spaced layers of the teacher, including the first and, for more than one, the last."""
    total = len(teacher.layers)
    if not 1 <= count <= total:
        raise InputError(f"student layers={count}: the teacher has {total} layers; expected 1 to {total}")
    return space_layers_evenly(count, total)


def check_sizes(sizes: Sizes, teacher: Sizes, *, fresh: bool = False) -> Sizes:
    """Returns `sizes` after checking them; a fresh student may have any sizes that its class supports.

    Raises:
        InputError: A size is not possible.
    """
    if not fresh:
        check_within(sizes, teacher)
    if not sizes.layers:
        raise InputError("student layers=0: expected at least 1")
    for key in (*_WIDTHS, "embeddings"):
        if getattr(sizes, key) < (key != "embeddings"):
            raise InputError(f"student {key}={getattr(sizes, key)}: expected at least 1")
    if sizes.free:
        return sizes
    widest = teacher.head_width
    narrow = sizes.hidden // sizes.heads
    if sizes.hidden % sizes.heads or (narrow > widest and not fresh):
        raise InputError(
            f"student hidden={sizes.hidden}, heads={sizes.heads}: expected heads that divide hidden into parts of at "
            f"most {widest}, the teacher's head width; found {sizes.hidden / sizes.heads:g}"
        )
    if sizes.head and narrow != sizes.head and not fresh:
        raise InputError(
            f"student hidden={sizes.hidden}, heads={sizes.heads}: expected heads {sizes.head} wide as the teacher's, "
            f"found {narrow}: rotary position embeddings depend on the width of a head"
        )
    return replace(sizes, head=narrow) if sizes.head else sizes


def check_within(sizes: Sizes, teacher: Sizes) -> None:
    """Checks that no size exceeds the teacher's."""
    total = len(teacher.layers)
    if not sizes.layers or any(not 0 <= i < total for i in sizes.layers) or len(set(sizes.layers)) < len(sizes.layers):
        raise InputError(
            f"student layers={','.join(map(str, sizes.layers))}: expected distinct numbers from 0 to {total - 1}, "
            "the teacher's layers"
        )
    for key in _WIDTHS:
        size, limit = getattr(sizes, key), getattr(teacher, key)
        if not 1 <= size <= limit:
            raise InputError(
                f"student {key}={size}: expected 1 to {limit}, the teacher's; a student built from its teacher "
                "can't be wider than it"
            )
