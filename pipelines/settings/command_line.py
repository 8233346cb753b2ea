"""Parsing of command lines: flags get their full names, occur at most once, and each has a value."""

import difflib
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import get_args, get_origin

from distill.errors import InputError
from pipelines.settings.values import check_number_format
from pipelines.settings.yaml_file import check_value

CONFIG_OPTION = "config"
HELP = ("-h", "--help")


def full_flag(argument: str, short: Mapping[str, str]) -> str:
    """Expands a flag to its full name: `--batch-size=8` -> `--train.batch_size=8`."""
    if not argument.startswith("--") or argument == "--":
        return argument
    name, equals, value = argument[2:].partition("=")
    name = name.replace("-", "_")
    return f"--{short.get(name, name)}{equals}{value}"


def add_switch_values(arguments: Sequence[str], fields: Mapping[str, object]) -> list[str]:
    """Adds the value to boolean flags without one: `--dry_run --output x` -> `--dry_run=true --output x`."""
    return [
        f"{argument}=true"
        if is_switch(fields.get(argument.removeprefix("--"))) and following.startswith("--")
        else argument
        for argument, following in zip_longest(arguments, arguments[1:], fillvalue="--")
    ]


def is_switch(field_type: object) -> bool:
    """Returns whether a setting's type is bool, or a union that contains bool."""
    return field_type is bool or bool in get_args(field_type)


def split_arguments(
    argv: Sequence[str], fields: Mapping[str, object], short: Mapping[str, str], prog: str
) -> tuple[list[str], list[str]]:
    """Returns (arguments with full flag names, names of the config files in their order on the command line).

    Raises:
        InputError: A flag is unknown under both its full and its short name, occurs twice, or has no value.
    """
    arguments = add_switch_values([full_flag(argument, short) for argument in argv], fields)
    rest: list[str] = []
    files: list[str] = []
    values: dict[str, str] = {}
    hint = f" (see python -m {prog} --help)"
    i = 0
    while i < len(arguments):
        argument, i = arguments[i], i + 1
        if argument in HELP:
            rest.append("--help")
            continue
        flag, equals, value = argument.partition("=")
        name = flag.removeprefix("--")
        if not argument.startswith("--") or not name:
            raise InputError(f"expected a flag such as --output, found {argument!r}{hint}")
        if name != CONFIG_OPTION and name not in fields:
            nearest = find_nearest_flag(name, fields, short)
            raise InputError(f"unknown flag {flag}; the nearest is --{nearest}{hint}")
        if not equals:
            if i == len(arguments) or arguments[i].startswith("--"):
                found = "none" if i == len(arguments) else arguments[i]
                raise InputError(f"{flag}: expected a value after it, found {found}")
            value, i = arguments[i], i + 1
        if name == CONFIG_OPTION:
            files.append(value)
            continue
        if name in values:
            raise InputError(
                f"{flag} is given twice, as {values[name]!r} and {value!r}: it is unclear which one is meant"
            )
        values[name] = value
        check_number_format(flag, fields[name], value)
        if get_origin(fields[name]) in (tuple, dict):
            check_value(flag, value)
        rest.append(f"{flag}={value}")
    return rest, files


def find_nearest_flag(name: str, fields: Mapping[str, object], short: Mapping[str, str]) -> str:
    """Returns the full name of the known flag whose spelling is closest to `name`."""
    nearest = difflib.get_close_matches(name, [*fields, *short, CONFIG_OPTION], 1, cutoff=0)[0]
    return short.get(nearest, nearest)


def override_flags(arguments: Sequence[str], overrides: Sequence[str], short: Mapping[str, str]) -> list[str]:
    """Returns `arguments` followed by `overrides`, without the flags of `arguments` that `overrides` contains too.

    A command line may contain each flag only once, except `--config`; use this function to override a flag.
    """
    groups = [group for part in (arguments, overrides) for group in _group_flags(part)]
    names = [full_flag(group[0], short).partition("=")[0] for group in groups]
    last = {name: i for i, name in enumerate(names)}
    remaining = [group for i, group in enumerate(groups) if last[names[i]] == i or names[i] == f"--{CONFIG_OPTION}"]
    return [argument for group in remaining for argument in group]


def _group_flags(arguments: Sequence[str]) -> list[list[str]]:
    """Returns each flag together with its value, if the value is a separate argument."""
    groups: list[list[str]] = []
    for argument in arguments:
        if argument.startswith("--") or not groups or len(groups[-1]) > 1 or "=" in groups[-1][0]:
            groups.append([argument])
        else:
            groups[-1].append(argument)
    return groups
