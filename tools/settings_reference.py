"""Writes docs/reference/settings.md: every setting of every command, read from the commands' own parsers.

python tools/settings_reference.py             writes the page
python tools/settings_reference.py --check     exits with code 1 if the page differs from the settings
"""

import argparse
import dataclasses
import sys
import types
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin
from unittest.mock import patch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from pipelines import cache  # noqa: E402
from pipelines.__main__ import COMMANDS  # noqa: E402
from pipelines.runs import cli  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "settings.md"
MAKE = "python tools/settings_reference.py"
NAMES = {int: "integer", float: "number", str: "text", bool: "`true`, `false`", type(None): "none"}
HEADER = f"""\
# Settings

Every setting of every command, with its type, default and meaning. This page is generated from the code by
`{MAKE}`; the same texts are printed by `--help` of each command.

A setting is given as a flag (`--train.epochs 3`), in a YAML file (`train.epochs: 3`, or `epochs: 3` under `train:`), or
by its short name where it has one (`--epochs 3`). Several `--config FILE.yaml` are read in order; later files override
earlier ones, and flags override files. A file may be a recipe of this project: `--config recipe:pruned`.
"""


@dataclass(frozen=True)
class Command:
    """A command as it calls the parser of its settings.

    Args:
        name: Words after `stillroom`, such as `cache write`.
        config: The class of its settings.
        about: What `--help` says about it.
        short: Short name -> full name of a setting.
    """

    name: str
    config: type
    about: str
    short: Mapping[str, str]


@dataclass(frozen=True)
class Setting:
    """A setting of a command.

    Args:
        name: Full name, such as `train.epochs`.
        type: Its type as a reader writes it.
        default: Its default as a reader writes it.
        meaning: Its description; empty if the docstring of its class has none.
    """

    name: str
    type: str
    default: str
    meaning: str


class ParserCalledError(Exception):
    """Raised in place of parsing, with the arguments of the parser."""


def all_commands() -> list[Command]:
    """Returns every command, by calling each one's main function up to the parsing of its arguments."""
    commands = []
    for name in COMMANDS:
        main = import_module(f"pipelines.{name}").main
        for subcommand in [[word] for word in cache.ABOUT] if name == "cache" else [[]]:
            commands.append(called_parser(" ".join([name, *subcommand]), main, subcommand))
    return commands


def called_parser(name: str, main: Any, arguments: Sequence[str]) -> Command:
    """Returns a command with the parser that its `main` builds."""

    def parse(config: type, argv: Sequence[str], **about: Any) -> NoReturn:
        raise ParserCalledError(config, about["about"], about["short"])

    with patch.object(cli, "parse", parse):
        try:
            main(arguments)
        except ParserCalledError as call:
            return Command(name, *call.args)
    raise AssertionError(f"stillroom {name}: its settings were not parsed by pipelines.runs.cli.parse")


def list_settings(command: Command) -> list[Setting]:
    """Returns the command's settings in the order of their classes, each group after the settings beside it."""
    parser = cli.build_parser(command.config, prog=command.name, about=command.about, examples="", short=())
    meanings = {action.dest: action.help for action in parser._actions}
    return [
        Setting(name, type_text(kind), default_text(default), " ".join((meanings.get(name) or "").split()))
        for name, kind, default in leaves(command.config)
    ]


def leaves(config: type | Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields (name, type, default) of a settings class, or of an instance whose values are the defaults."""
    fields = dataclasses.fields(config)
    for field in fields:
        if not dataclasses.is_dataclass(field.type):
            yield prefix + field.name, field.type, cli.find_default(config, field)
    for field in fields:
        if dataclasses.is_dataclass(field.type):
            yield from leaves(cli.find_default(config, field), f"{prefix}{field.name}.")


def list_groups(command: Command) -> dict[str, str]:
    """Returns group -> its description, such as `general.train` -> `Optimizer, schedule and training loop of …`."""
    parser = cli.build_parser(command.config, prog=command.name, about="", examples="", short=())
    return {
        action.dest: " ".join((group.title or "").split())
        for group in parser._action_groups
        for action in group._group_actions
        if action.dest in group_names(command.config)
    }


def group_names(config: type, prefix: str = "") -> set[str]:
    """Returns the dotted names of all groups of settings."""
    inner = [field for field in dataclasses.fields(config) if dataclasses.is_dataclass(field.type)]
    return {prefix + field.name for field in inner}.union(
        *(group_names(field.type, f"{prefix}{field.name}.") for field in inner)  # type: ignore[arg-type]
    )


def type_text(kind: Any) -> str:
    """Returns a type as a reader writes it: `Literal["a", "b"]` -> `a`, `b`; `float | None` -> number or none."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if origin in (Union, types.UnionType):
        return " or ".join(type_text(each) for each in inner)
    if origin is tuple:
        if inner[-1] is Ellipsis:
            return f"list of {type_text(inner[0])}"
        return f"{len(inner)} of {type_text(inner[0])}"
    if origin is dict:
        return f"map of {type_text(inner[0])} to {type_text(inner[1])}"
    return NAMES[kind]


def default_text(value: Any) -> str:
    """Returns a default value as text."""
    if value is None or value in ("", (), {}):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{value}`"


def page_text(commands: Sequence[Command]) -> str:
    """Returns the page; a command whose settings are another's is described by its short names only."""
    described: dict[type, str] = {}
    parts = [HEADER, command_table(commands)]
    for command in commands:
        parts.append(f"## {command.name}\n\n{command.about}\n")
        base = next((each for each in described if issubclass(command.config, each)), None)
        if base is not None:
            other, more = described[base], base is not command.config
            parts.append(f"Its settings are those of [{other}](#{slug(other)}){', and these' if more else ''}.\n")
        if base is command.config:
            parts.append(short_names_text(command))
            continue
        described[command.config] = command.name
        known = set() if base is None else {name for name, _, _ in leaves(base)}
        parts += tables(command, known)
    return "\n".join(parts)


def command_table(commands: Sequence[Command]) -> str:
    """Returns the table of commands."""
    rows = [f"| [`stillroom {each.name}`](#{slug(each.name)}) | {each.about} |" for each in commands]
    return "\n".join(["| command | what it does |", "|---|---|", *rows, ""])


def slug(name: str) -> str:
    """Returns the anchor of a heading."""
    return name.replace(" ", "-")


def short_names_text(command: Command) -> str:
    """Returns a command's short names of settings as text."""
    listed = ", ".join(f"`--{name}` for `--{full}`" for name, full in sorted(command.short.items()))
    return f"Short names: {listed}.\n"


def tables(command: Command, known: Container[str] = ()) -> Iterator[str]:
    """Yields a table for the settings beside no group, then heading and table of each group, without known ones."""
    groups = list_groups(command)
    by_group: dict[str, list[Setting]] = {}
    for setting in list_settings(command):
        if setting.name in known:
            continue
        by_group.setdefault(setting.name.rpartition(".")[0], []).append(setting)
    for group, settings in by_group.items():
        if group:
            yield f"### {command.name}: {group}\n\n{groups[group].rstrip('.')}.\n"
        yield table(settings, command.short)


def table(settings: Sequence[Setting], short: Mapping[str, str]) -> str:
    """Returns the table of some settings."""
    brief = {full: name for name, full in short.items()}
    rows = [[option_text(each.name, brief), each.type, each.default, each.meaning] for each in settings]
    head = ["| option | type | default | meaning |", "|---|---|---|---|"]
    return "\n".join([*head, *(f"| {' | '.join(map(cell, row))} |" for row in rows), ""])


def cell(text: str) -> str:
    """Returns text for a cell of a table."""
    return text.replace("|", r"\|")


def option_text(name: str, brief: Mapping[str, str]) -> str:
    """Returns an option as it is written on the command line."""
    return f"`--{name}`" + (f", `--{brief[name]}`" if name in brief else "")


def main(argv: Sequence[str]) -> int:
    """Writes the reference, or with `--check` compares it with the code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only compare the page with the settings")
    arguments = parser.parse_args(argv)
    text = page_text(all_commands())
    if not arguments.check:
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(text)
        return 0
    if PAGE.is_file() and PAGE.read_text() == text:
        return 0
    print(f"{PAGE.relative_to(ROOT)}: differs from the settings in the code; run {MAKE}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
