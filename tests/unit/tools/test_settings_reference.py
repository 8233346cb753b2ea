"""docs/reference/settings.md holds every setting of every command, each with a description, and isn't stale."""

import sys
from dataclasses import dataclass, field
from importlib.util import module_from_spec, spec_from_file_location
from typing import Literal

import pytest

from pipelines.runs import cli
from pipelines.settings.commands.distill import DistillConfig
from support.commands import ROOT


@pytest.fixture(scope="module")
def reference():
    spec = spec_from_file_location("settings_reference", ROOT / "tools" / "settings_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["settings_reference"] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Inner:
    """Inner settings.

    Args:
        share: Share of the rows; `a|b` has a bar.
        kind: How.
    """

    share: float = 0.5
    kind: Literal["one", "two"] = "one"


@dataclass(frozen=True)
class Outer:
    """Settings.

    Args:
        inner: What is inside.
        name: A name.
        weights: Their weights.
        bare: Whether it is bare.
    """

    name: str = ""
    weights: tuple[float, ...] = ()
    bare: bool = False
    nameless: int | None = None
    inner: Inner = field(default_factory=lambda: Inner(share=0.25))


def command_of(reference, config: type = Outer, name: str = "outer"):
    return reference.Command(name, config, "Does a thing.", {"share": "inner.share"})


def test_the_page_is_up_to_date_with_the_settings(reference):
    assert reference.PAGE.read_text() == reference.page_text(reference.all_commands()), f"run {reference.MAKE}"


def test_every_setting_of_every_command_has_a_description(reference):
    for command in reference.all_commands():
        bare = [setting.name for setting in reference.list_settings(command) if not setting.meaning]
        assert not bare, f"stillroom {command.name}: settings that the docstrings of their classes don't describe"


def test_the_settings_of_a_command_are_those_that_it_parses(reference):
    commands = {command.name: command for command in reference.all_commands()}
    assert commands["distill"].config is commands["prune"].config is DistillConfig
    assert commands["prune"].short["model"] == "student.spec"
    assert {"cache write", "cache inspect", "cache verify", "cache rebuild"} <= set(commands)
    for command in commands.values():
        names = {setting.name for setting in reference.list_settings(command)}
        parser = cli.build_parser(command.config, prog="", about="", examples="", short=())
        parsed = {action.dest for action in parser._actions}
        assert parsed - {"help", "config"} - reference.group_names(command.config) == names


def test_types_and_defaults_are_those_of_the_command(reference):
    settings = {each.name: each for each in reference.list_settings(command_of(reference))}
    assert (settings["inner.share"].type, settings["inner.share"].default) == ("number", "`0.25`")
    assert (settings["inner.kind"].type, settings["inner.kind"].default) == ("`one`, `two`", "`one`")
    assert (settings["weights"].type, settings["weights"].default) == ("list of number", "")
    assert (settings["bare"].type, settings["bare"].default) == ("`true`, `false`", "`false`")
    assert (settings["nameless"].type, settings["nameless"].default) == ("integer or none", "")
    assert [name for name, each in settings.items() if not each.meaning] == ["nameless"]


def test_a_table_names_the_short_option_and_escapes_bars(reference):
    text = reference.page_text([command_of(reference), command_of(reference, name="other")])
    assert "### outer: inner\n\nWhat is inside.\n" in text
    assert r"| `--inner.share`, `--share` | number | `0.25` | Share of the rows; `a\|b` has a bar. |" in text
    assert "Its settings are those of [outer](#outer).\n\nShort names: `--share` for `--inner.share`." in text


def test_a_command_that_parses_nothing_is_reported(reference):
    with pytest.raises(AssertionError, match="stillroom silent: its settings were not parsed"):
        reference.called_parser("silent", lambda arguments: None, [])


def test_a_stale_page_fails_the_check_and_is_rewritten(reference, tmp_path, monkeypatch, capsys):
    page = tmp_path / "docs" / "settings.md"
    monkeypatch.setattr(reference, "ROOT", tmp_path)
    monkeypatch.setattr(reference, "PAGE", page)
    assert reference.main(["--check"]) == 1
    assert "docs/settings.md: differs from the settings in the code" in capsys.readouterr().err
    assert reference.main([]) == 0
    assert reference.main(["--check"]) == 0
    page.write_text(page.read_text() + "more\n")
    assert reference.main(["--check"]) == 1
