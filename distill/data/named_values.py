"""Comma-separated lists of steps with values, as settings have them."""

from collections.abc import Collection, Mapping
from difflib import get_close_matches

from distill.errors import InputError


def parse_named_values(
    text: str, setting: str, what: str, known: Collection[str], groups: Mapping[str, str]
) -> dict[str, str]:
    """Returns name -> value of a list such as `standard,length=3:200`, with "" for names without one.

    Args:
        text: The list.
        setting: Name of the setting, for errors.
        what: What the names stand for, for errors.
        known: All names.
        groups: Names that stand for several others, separated by commas, whose values given beside them count.

    Raises:
        InputError: A name is unknown (names the nearest) or given twice.
    """
    values: dict[str, str] = {}
    grouped: dict[str, str] = {}
    seen: set[str] = set()
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, _, value = (each.strip() for each in part.partition("="))
        if name in seen:
            raise InputError(f"{setting}: {what[:-1]} {name!r} is given twice: one of its values would be ignored")
        seen.add(name)
        if name in groups and not value:
            grouped |= dict.fromkeys(groups[name].split(","), "")
        elif name in known:
            values[name] = value
        elif name in groups:
            raise InputError(f"{setting}: {name}: expected no value, found {value!r}: give it to one of {groups[name]}")
        else:
            near = get_close_matches(name, [*groups, *known], 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InputError(f"{setting}: expected {what} among {', '.join([*groups, *known])}, found {name!r}{hint}")
    return grouped | values
