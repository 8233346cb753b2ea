"""Parsing of command lines: flags are written in full, given at most once, and each has a value."""

import difflib
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, get_args, get_origin

from distill.errors import InputError
from pipelines.settings.values import check_written
from pipelines.settings.yaml_file import check_value

CONFIG = "config"
HELP = ("-h", "--help")


def full_flag(word: str, short: Mapping[str, str]) -> str:
    """Expands a flag to its full name: `--batch-size=8` -> `--train.batch_size=8`."""
    if not word.startswith("--") or word == "--":
        return word
    name, equals, value = word[2:].partition("=")
    name = name.replace("-", "_")
    return f"--{short.get(name, name)}{equals}{value}"


def switched(words: Sequence[str], fields: Mapping[str, Any]) -> list[str]:
    """Adds the value to boolean flags given without one: `--dry_run --output x` -> `--dry_run=true --output x`."""
    return [
        f"{word}=true" if is_switch(fields.get(word.removeprefix("--"))) and after.startswith("--") else word
        for word, after in zip_longest(words, words[1:], fillvalue="--")
    ]


def is_switch(kind: Any) -> bool:
    """Returns whether a setting's type is bool, or a union that contains bool."""
    return kind is bool or bool in get_args(kind)


def split_words(
    argv: Sequence[str], fields: Mapping[str, Any], short: Mapping[str, str], prog: str
) -> tuple[list[str], list[str]]:
    """Returns (arguments with full flag names, names of the config files in the order given).

    Raises:
        InputError: A flag is unknown under both its full and its short name, is given twice, or has no value.
    """
    words = switched([full_flag(word, short) for word in argv], fields)
    rest: list[str] = []
    files: list[str] = []
    values: dict[str, str] = {}
    hint = f" (see python -m {prog} --help)"
    i = 0
    while i < len(words):
        word, i = words[i], i + 1
        if word in HELP:
            rest.append("--help")
            continue
        flag, equals, value = word.partition("=")
        name = flag.removeprefix("--")
        if not word.startswith("--") or not name:
            raise InputError(f"expected a flag such as --output, found {word!r}{hint}")
        if name != CONFIG and name not in fields:
            near = nearest(name, fields, short)
            raise InputError(f"unknown flag {flag}; the nearest is --{near}{hint}")
        if not equals:
            if i == len(words) or words[i].startswith("--"):
                raise InputError(f"{flag}: expected a value after it, found {'none' if i == len(words) else words[i]}")
            value, i = words[i], i + 1
        if name == CONFIG:
            files.append(value)
            continue
        if name in values:
            raise InputError(
                f"{flag} is given twice, as {values[name]!r} and {value!r}: it can't be told which one is meant"
            )
        values[name] = value
        check_written(flag, fields[name], value)
        if get_origin(fields[name]) in (tuple, dict):
            check_value(flag, value)
        rest.append(f"{flag}={value}")
    return rest, files


def nearest(name: str, fields: Mapping[str, Any], short: Mapping[str, str]) -> str:
    """Returns the full name of the known flag whose spelling is closest to `name`."""
    near = difflib.get_close_matches(name, [*fields, *short, CONFIG], 1, cutoff=0)[0]
    return short.get(near, near)


def replace_words(words: Sequence[str], more: Sequence[str], short: Mapping[str, str]) -> list[str]:
    """Returns `words` followed by `more`, without the flags of `words` that `more` contains too.

    A command line may contain each flag only once; use this function to override a flag.
    """
    pairs = [pair for part in (words, more) for pair in flags_of(part)]
    last = {name_of(pair, short): i for i, pair in enumerate(pairs)}
    kept = [
        pair for i, pair in enumerate(pairs) if last[name_of(pair, short)] == i or name_of(pair, short) == f"--{CONFIG}"
    ]
    return [word for pair in kept for word in pair]


def flags_of(words: Sequence[str]) -> list[list[str]]:
    """Returns each flag together with its value, if the value is a separate argument."""
    found: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not found or len(found[-1]) > 1 or "=" in found[-1][0]:
            found.append([word])
        else:
            found[-1].append(word)
    return found


def name_of(pair: Sequence[str], short: Mapping[str, str]) -> str:
    return full_flag(pair[0], short).partition("=")[0]
