"""Sizes of a student: as shares of the teacher's, and checked against them."""

from dataclasses import dataclass, replace
from fractions import Fraction

from distill.errors import InputError
from distill.slicing.spacing import space_layers_evenly

WIDTHS = ("hidden", "heads", "ffn")


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
    def key_value_heads(self) -> int:
        """Number of key-value heads."""
        return self.kv or self.heads


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
    """Returns `count` evenly spaced layers of the teacher, including the first and, for more than one, the last.

    Raises:
        InputError: The teacher has fewer layers, or none is requested.
    """
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
    for key in (*WIDTHS, "embeddings"):
        least = 0 if key == "embeddings" else 1  # 0: as wide as the layers
        if getattr(sizes, key) < least:
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
    """Checks that no size exceeds the teacher's.

    Raises:
        InputError: One does, or is below 1; or a layer isn't one of the teacher's, or is listed twice.
    """
    total = len(teacher.layers)
    if not sizes.layers or any(not 0 <= i < total for i in sizes.layers) or len(set(sizes.layers)) < len(sizes.layers):
        raise InputError(
            f"student layers={','.join(map(str, sizes.layers))}: expected distinct numbers from 0 to {total - 1}, "
            "the teacher's layers"
        )
    for key in WIDTHS:
        size, limit = getattr(sizes, key), getattr(teacher, key)
        if not 1 <= size <= limit:
            raise InputError(
                f"student {key}={size}: expected 1 to {limit}, the teacher's; a student built from its teacher "
                "can't be wider than it"
            )
