"""Checks of single settings that apply to all commands."""

import math
import os
import re
from collections.abc import Mapping
from typing import cast, overload

from distill.errors import InputError
from pipelines.settings.this_machine import count_cores

# Settings that contain a path: `~` is expanded, because shells don't expand it in arguments such as --output=~/runs.
_PATHS = frozenset(
    (
        "output", "run", "cache", "model", "teacher", "student", "data", "include", "teacher.model",
        "teacher.additional", "student.spec", "data.path", "data.unlabelled", "general.data", "chat.template",
        "machine.strategy", "select.target",
    )
)  # fmt: skip
# Numbers that YAML reads in an unexpected way: 010 as 8, and 1:30 as 90.
MISREAD = re.compile(r"[+-]?(0[0-7_]+|\d[\d_]*(:[0-5]?\d)+(\.\d*)?)")
PER_CORE = 4  # maximum threads or processes per core: more would only wait for one another
_ALWAYS = 16  # number that is accepted on any machine


def settle_value(name: str, value: object) -> object:
    """Returns the value of the setting called `name`, with `~` in paths expanded.

    Raises:
        InputError: The home folder doesn't exist, a number isn't finite, or more threads or processes are requested
            than are useful on this machine.
    """
    if name in _PATHS:
        return (
            tuple(expand_home(name, each) for each in value) if isinstance(value, tuple) else expand_home(name, value)
        )
    if name.rpartition(".")[2] == "threads":
        check_count(name, cast(int, value))
    _check_finite(name, value)
    return value


@overload
def expand_home(name: str, path: str) -> str: ...
@overload
def expand_home(name: str, path: object) -> object: ...
def expand_home(name: str, path: object) -> object:
    """Returns a path with `~` expanded; any value that isn't a string is returned unchanged.

    Raises:
        InputError: The home folder doesn't exist, or the path contains a null character.
    """
    if not isinstance(path, str):
        return path
    if "\0" in path:
        raise InputError(f"{name} {path!r}: expected a path, found a null character in it")
    full = os.path.expanduser(path)  # noqa: PTH111, a hub id or a spec must stay as written
    if full.startswith("~"):
        raise InputError(f"{name} {path!r}: there is no home folder of that name; write ./{path} for a file called so")
    return full


def check_count(name: str, count: int) -> None:
    """Checks a number of threads or processes of this machine.

    Raises:
        InputError: It is negative, or more than are useful on its cores.
    """
    if count < 0:
        raise InputError(f"{name}: expected at least 0, found {count}")
    cores = count_cores()
    limit = max(_ALWAYS, PER_CORE * cores)
    if count > limit:
        raise InputError(
            f"{name}: expected at most {limit} on this machine's {cores} cores, found {count}: they would only wait "
            "for one another"
        )


def _check_finite(name: str, value: object) -> None:
    if isinstance(value, Mapping):
        value = [*value.values()]
    if isinstance(value, list | tuple):
        for each in value:
            _check_finite(name, each)
    elif isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{name}: expected a number, found {value}: nothing can be computed with it")


def check_number_format(where: str, field_type: object, text: str) -> None:
    """Checks that YAML reads a number as the decimal number it looks like.

    Raises:
        InputError: YAML reads the number differently.
    """
    if field_type in (int, float, float | None) and MISREAD.fullmatch(text):
        raise InputError(f"{where}: expected a decimal number, found {text!r}, which YAML reads as another number")
