"""Parsing of `--student`: a preset, sizes relative to the teacher, or a separate checkpoint."""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from distill.errors import InputError
from distill.student.norms import check_kind
from distill.student.sizes import SHARE_PRESETS, WIDTHS, Shares, Sizes, check_sizes, select_layers_evenly, with_heads

KEYS = ("layers", *WIDTHS, "embeddings")
BLOCK_KEYS = (*KEYS, "inner", "stacks")  # for bottleneck students
ATTENTION_FREE_KEYS = ("embeddings", "hidden", "layers", "kernel", "ngrams", "positions")
FRESH = "fresh"
NORM_KEY = "norm"
POOLING_KEY = "pooling"
POOLING_KINDS = ("mean", "weighted", "max", "order")
NEAR = 0.75  # similarity of a misspelt preset; no hub name without a slash is this close to a preset
BOTTLENECK_PRESETS = ("mobilebert", "mobilebert-tiny", "inverted-bottleneck")
ATTENTION_FREE_PRESETS = ("static", "cnn", "gru")  # over vectors of tokens, without attention
DEFAULT_POOLING = {"static": ("weighted",), "cnn": ("mean", "max"), "gru": ("mean", "max")}
PRESETS = (*SHARE_PRESETS, *BOTTLENECK_PRESETS, *ATTENTION_FREE_PRESETS)


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
        return self.preset in BOTTLENECK_PRESETS

    @property
    def is_attention_free(self) -> bool:
        """Whether the student consists of token vectors without attention."""
        return self.preset in ATTENTION_FREE_PRESETS


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
    return is_relative(spec) and parse_spec(spec).is_attention_free


def is_bottleneck(spec: str) -> bool:
    """Returns whether a spec describes a student of bottleneck blocks."""
    return is_relative(spec) and parse_spec(spec).is_bottleneck


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
    if preset in ATTENTION_FREE_PRESETS:
        return (*ATTENTION_FREE_KEYS, POOLING_KEY)
    return (*(BLOCK_KEYS if preset in BOTTLENECK_PRESETS else KEYS), NORM_KEY)


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
    if parsed.requested.get("embeddings") == (0,):
        raise InputError(
            f"student {spec}: expected embeddings of at least 1, found 0; leave it out for the layers' width"
        )
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
    """Returns the sizes with the requested layers, or else unchanged.

    Raises:
        InputError: The teacher has fewer layers than requested.
    """
    numbers = parsed.requested.get("layers")
    if not numbers:
        return sizes
    if len(numbers) > 1:
        return replace(sizes, layers=numbers)
    # Randomly initialized layers don't come from the teacher, so their number may exceed the teacher's.
    return replace(
        sizes, layers=tuple(range(numbers[0])) if parsed.fresh else select_layers_evenly(numbers[0], teacher)
    )
