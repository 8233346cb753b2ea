"""What `--student` says: a preset, sizes relative to the teacher, or a checkpoint of its own."""

import re
from dataclasses import dataclass, replace

from distill.errors import InputError

KEYS = ("layers", "hidden", "heads", "ffn")


@dataclass(frozen=True)
class Sizes:
    """Sizes of an encoder: which of the teacher's layers, and widths."""

    layers: tuple[int, ...]
    hidden: int
    heads: int
    ffn: int


@dataclass(frozen=True)
class StudentConfig:
    """The student to train.

    Args:
        spec: A hub id or folder; a preset (distilbert: every second layer; half: half of every width; teacher: all of
            it); or sizes such as `layers=2`, `layers=0,2,5` or `layers=3,hidden=192,heads=6,ffn=768`. Left out it is
            distilbert, and teacher where a budget says how much is pruned.
        layout: How it lies on the processes: replicated, zero1, zero2, fsdp=N, hsdp=RxS, tp=N, fsdp=N,tp=M; auto is
            replicated where training fits into each process's memory, else fsdp.
        given: It is trained already, and used as it is; `spec` is then teacher or a checkpoint.
        offload: FSDP keeps weights, gradients and the optimizer's state in the CPU's memory.
    """

    spec: str = ""
    layout: str = "auto"
    given: bool = False
    offload: bool = False


PRESETS = ("distilbert", "half", "teacher")


def is_relative(spec: str) -> bool:
    """Whether the spec builds on the teacher (else it is a checkpoint)."""
    return spec in PRESETS or "=" in spec


def resolve(spec: str, teacher: Sizes) -> Sizes:
    """Sizes of the student that `spec` asks for.

    Raises:
        InputError: An unknown key, a size that isn't a number, is larger than the teacher's or doesn't divide.
    """
    if spec == "teacher":
        return teacher
    if spec == "distilbert":
        return replace(teacher, layers=teacher.layers[::2])
    if spec == "half":
        return checked(Sizes(teacher.layers, teacher.hidden // 2, teacher.heads // 2, teacher.ffn // 2), teacher)
    asked = parse(spec)
    sizes = teacher
    if "layers" in asked:
        numbers = asked["layers"]
        sizes = replace(sizes, layers=evenly(numbers[0], teacher) if len(numbers) == 1 else tuple(numbers))
    for key in ("hidden", "heads", "ffn"):
        if key in asked:
            sizes = replace(sizes, **{key: asked[key][0]})  # type: ignore[arg-type]
    if "hidden" in asked and "heads" not in asked:
        sizes = replace(sizes, heads=max(1, sizes.hidden * teacher.heads // teacher.hidden))
    return checked(sizes, teacher)


def parse(spec: str) -> dict[str, list[int]]:
    asked: dict[str, list[int]] = {}
    for part in re.split(r",(?=[^,=]+=)", spec):
        key, _, value = part.partition("=")
        if key.strip() not in KEYS:
            raise InputError(f"student {spec!r}: expected {', '.join(KEYS)}, found {key.strip()!r}")
        if not re.fullmatch(r"\s*\d+(\s*,\s*\d+)*\s*", value):
            raise InputError(f"student {spec!r}: expected numbers after {key}=, found {value!r}")
        numbers = [int(number) for number in value.split(",")]
        if key.strip() != "layers" and len(numbers) != 1:
            raise InputError(f"student {spec!r}: expected one number for {key}, found {value!r}")
        asked[key.strip()] = numbers
    return asked


def evenly(count: int, teacher: Sizes) -> tuple[int, ...]:
    """`count` of the teacher's layers, the first and the last among them."""
    total = len(teacher.layers)
    if not 1 <= count <= total:
        raise InputError(f"student layers={count}: the teacher has {total} layers; expected 1 to {total}")
    if count == 1:
        return (0,)
    return tuple(round(i * (total - 1) / (count - 1)) for i in range(count))


def checked(sizes: Sizes, teacher: Sizes) -> Sizes:
    total = len(teacher.layers)
    if not sizes.layers or any(not 0 <= i < total for i in sizes.layers) or len(set(sizes.layers)) < len(sizes.layers):
        raise InputError(
            f"student layers={','.join(map(str, sizes.layers))}: expected distinct numbers from 0 to {total - 1}, "
            "the teacher's layers"
        )
    for key in ("hidden", "heads", "ffn"):
        size, most = getattr(sizes, key), getattr(teacher, key)
        if not 1 <= size <= most:
            raise InputError(
                f"student {key}={size}: expected 1 to {most}, the teacher's; a student built from its teacher "
                "can't be wider than it"
            )
    if sizes.hidden % sizes.heads or sizes.hidden // sizes.heads > teacher.hidden // teacher.heads:
        widest = teacher.hidden // teacher.heads
        raise InputError(
            f"student hidden={sizes.hidden}, heads={sizes.heads}: expected heads that divide hidden into parts of at "
            f"most {widest}, the teacher's head width; found {sizes.hidden / sizes.heads:g}"
        )
    return sizes
