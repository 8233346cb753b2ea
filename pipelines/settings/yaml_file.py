"""Parsing of settings in YAML files: each setting occurs at most once, has a value, and strings are taken literally."""

import difflib
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Union, get_args, get_origin

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from distill.errors import InputError
from pipelines.settings.recipes import recipe_file
from pipelines.settings.values import check_number_format

MOST_BYTES = 2**17
MOST_LEVELS = 32
MOST_NODES = 20_000  # values and keys; aliased nodes count at each use
NULL, MERGE, TEXT = "tag:yaml.org,2002:null", "tag:yaml.org,2002:merge", "tag:yaml.org,2002:str"


@dataclass(frozen=True)
class KnownSettings:
    """The settings of a command.

    Args:
        fields: Dotted name -> type of every setting.
        short: Short name -> dotted name.
    """

    fields: Mapping[str, object]
    short: Mapping[str, str]

    def is_group(self, name: str) -> bool:
        """Returns whether a name is that of a group of settings."""
        return any(field.startswith(f"{name}.") for field in self.fields)

    def find_nearest(self, name: str) -> str:
        """Returns the setting, or its short name, whose spelling is closest to `name`."""
        return difflib.get_close_matches(name, [*self.fields, *self.short], 1, cutoff=0)[0]


def read_yaml(file: str, fields: Mapping[str, object], short: Mapping[str, str]) -> dict[str, object]:
    """Returns dotted name -> value of every setting in a YAML file.

    Scalars of string settings are taken literally: `wandb: off` is "off", not false, and `pattern: 2:4` is "2:4".

    Raises:
        InputError: The file can't be read or isn't YAML; a key is unknown, occurs twice (in one group, at two depths
            or in two spellings) or has no value; aliases are circular or expand to too many values.
    """
    where = f"config {file!r}"
    text = read_text(recipe_file(file), where)
    try:
        check_nesting(text, where)
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if not isinstance(root, MappingNode):
            raise InputError(f"{where}: expected settings as `name: value`, found {_describe_node(root)}")
        reader = Reader(where, KnownSettings(fields, short), loader)
        return {name: reader.value(name, node) for name, node in reader.settings(root, "").items()}
    except yaml.YAMLError as error:
        raise InputError(f"{where}: not well-formed YAML: {error}") from error


def read_text(file: str, where: str) -> str:
    """Returns the content of a settings file.

    Raises:
        InputError: The file doesn't exist, is a folder, can't be read, is too large for settings, or isn't UTF-8 text.
    """
    path = Path(file)
    if not file or path.is_dir():
        raise InputError(f"{where}: expected a YAML file, found {'a folder' if file else 'no name'}")
    try:
        with path.open("rb") as opened:
            content = opened.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        raise InputError(f"{where}: can't be read: {getattr(error, 'strerror', None) or error}") from error
    if len(content) > MOST_BYTES:
        raise InputError(f"{where}: expected settings, found more than {MOST_BYTES:,} bytes: is it another file?")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: expected UTF-8, found other bytes: {error}") from error


def check_nesting(text: str, where: str) -> None:
    """Checks depth and aliases from the file's events, without building nodes, to limit stack and memory use.

    Raises:
        InputError: The file has too many levels, an alias inside its own anchor, or aliases that expand to too many
            values.
    """
    open_nodes: list[tuple[str | None, int]] = []  # (anchor, number of nodes before it)
    sizes: dict[str, int] = {}
    count = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            line = _find_line(event)
            if any(anchor == event.anchor for anchor, _ in open_nodes):
                raise InputError(
                    f"{where}, line {line}: alias *{event.anchor} occurs inside its own anchor: its value would be "
                    "infinite"
                )
            count += sizes.get(event.anchor or "", 1)
        elif isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((event.anchor, count))
            count += 1
            if len(open_nodes) > MOST_LEVELS:
                raise InputError(
                    f"{where}, line {_find_line(event)}: expected settings, at most {MOST_LEVELS} levels deep"
                )
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_nodes.pop()
            if anchor is not None:
                sizes[anchor] = count - before
        elif isinstance(event, yaml.ScalarEvent):
            count += 1
            if event.anchor is not None:
                sizes[event.anchor] = 1
        if count > MOST_NODES:
            raise InputError(f"{where}: expected settings, found more than {MOST_NODES:,} values once aliases unfold")


@dataclass
class Reader:
    """Extracts settings from the nodes of a YAML file.

    Args:
        where: Name of the file, for messages.
        known: The settings of the command.
        loader: Converts nodes to values.
    """

    where: str
    known: KnownSettings
    loader: yaml.SafeLoader

    def settings(self, group: MappingNode, prefix: str) -> dict[str, Node]:
        """Returns dotted name -> value node of every setting in a group and its subgroups."""
        nodes: dict[str, Node] = {}
        lines: dict[str, int] = {}
        for name, key, value in self.entries(group, prefix):
            for full, node in self.entry(name, key, value).items():
                if full in nodes:
                    raise InputError(
                        f"{self.where}: {full} is given twice, in line {lines[full]} and line {_find_line(key)}: it is "
                        "unclear which one is meant"
                    )
                nodes[full], lines[full] = node, _find_line(key)
        return self.merged(group, prefix) | nodes

    def entries(self, group: MappingNode, prefix: str) -> Iterator[tuple[str, ScalarNode, Node]]:
        """Yields (dotted name, key, value) of a group's own keys."""
        seen: dict[str, int] = {}
        for key, value in group.value:
            if not isinstance(key, ScalarNode):
                raise InputError(
                    f"{self.where}, line {_find_line(key)}: expected a name before the colon, found {key.id}"
                )
            if key.tag == MERGE:
                continue
            if key.value in seen:
                raise InputError(
                    f"{self.where}: key {prefix + key.value!r} is given twice, in line {seen[key.value]} and line "
                    f"{_find_line(key)}: it is unclear which one is meant"
                )
            seen[key.value] = _find_line(key)
            yield f"{prefix}{key.value}", key, value

    def merged(self, group: MappingNode, prefix: str) -> dict[str, Node]:
        """Returns the settings that `<<: *others` merges into a group.

        The group's own settings override merged ones; of several merged groups the first takes precedence.
        """
        nodes: dict[str, Node] = {}
        for key, value in group.value:
            if key.tag != MERGE:
                continue
            for other in value.value if isinstance(value, SequenceNode) else [value]:
                if not isinstance(other, MappingNode):
                    raise InputError(
                        f"{self.where}, line {_find_line(key)}: expected a group to merge, found {other.id}"
                    )
                nodes = self.settings(other, prefix) | nodes
        return nodes

    def entry(self, name: str, key: ScalarNode, value: Node) -> dict[str, Node]:
        """Returns the settings under one key: those of a group, or the setting itself."""
        where = f"{self.where}, line {_find_line(key)}"
        short, is_group = self.known.short.get(name), self.known.is_group(name)
        if isinstance(value, MappingNode) and name not in self.known.fields and is_group:
            return self.settings(value, f"{name}.")
        full = short or name
        if full not in self.known.fields:
            if is_group:
                raise InputError(f"{where}: expected settings below {name!r}, found {_describe_node(value)}")
            raise InputError(f"{where}: unknown key {name!r}; the nearest is {self.known.find_nearest(name)!r}")
        if value.tag == NULL and not takes_none(self.known.fields[full]):
            raise InputError(f"{where}: {full} has no value: write one after the colon, or leave the key out")
        return {full: value}

    def value(self, name: str, node: Node) -> object:
        """Returns the value of a setting's node; strings are taken literally."""
        for each in (node, *(node.value if isinstance(node, SequenceNode) else ())):
            if isinstance(each, ScalarNode) and each.tag != NULL and takes_text(self.known.fields[name]):
                each.tag = TEXT
        if isinstance(node, ScalarNode):
            check_number_format(f"{self.where}, line {_find_line(node)}: {name}", self.known.fields[name], node.value)
        check_keys(node, f"{self.where}: {name}")
        value: object = self.loader.construct_object(node, deep=True)
        return value


def check_value(name: str, text: str) -> None:
    """Checks the value of a flag that is a list or mapping, such as `--loss.ramps '{"hidden": [1, 0]}'`.

    Raises:
        InputError: The value is nested too deeply, contains a circular alias, or contains a key twice.
    """
    try:
        check_nesting(text, name)
        node = yaml.SafeLoader(text).get_single_node()
    except yaml.YAMLError as error:
        raise InputError(f"{name}: expected a list or a mapping, found {_shorten(text)}: {error}") from error
    if node is not None:
        check_keys(node, name)


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:77]}...")


def check_keys(node: Node, where: str) -> None:
    """Checks that a setting that is a mapping, such as `loss.ramps`, contains each key once.

    Raises:
        InputError: A key occurs twice.
    """
    if isinstance(node, MappingNode):
        keys = [key.value for key, _ in node.value if isinstance(key, ScalarNode)]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise InputError(f"{where}: key {twice!r} is given twice: it is unclear which one is meant")


def _find_line(part: Node | yaml.Event) -> int:
    return part.start_mark.line + 1 if part.start_mark is not None else 1


def _describe_node(node: Node | None) -> str:
    if node is None or node.tag == NULL:
        return "nothing"
    return repr(node.value) if isinstance(node, ScalarNode) else "a list"


def takes_none(field_type: object) -> bool:
    """Returns whether a setting may be None."""
    return field_type is type(None) or any(takes_none(each) for each in _union_types(field_type))


def takes_text(field_type: object) -> bool:
    """Returns whether a setting, or each element of a setting that is a tuple, is a string."""
    if get_origin(field_type) is tuple:
        return all(each is Ellipsis or takes_text(each) for each in get_args(field_type))
    if get_origin(field_type) is Literal:
        return all(isinstance(each, str) for each in get_args(field_type))
    members = _union_types(field_type)
    return field_type is str or (any(takes_text(each) for each in members) and bool not in members)


def _union_types(field_type: object) -> Sequence[object]:
    return get_args(field_type) if get_origin(field_type) in (Union, types.UnionType) else ()
