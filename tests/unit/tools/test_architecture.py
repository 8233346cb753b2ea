"""The architecture page shows the packages of the code, and names files and functions that exist."""

import importlib
import re
import sys
from xml.etree import ElementTree

import pytest

from support.commands import ROOT


@pytest.fixture(scope="module")
def architecture():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tools"))
        yield importlib.import_module("architecture")
        for name in ("architecture", "layered_drawing"):
            del sys.modules[name]


@pytest.fixture(scope="module")
def drawing(architecture):
    return sys.modules["layered_drawing"]


def test_picture_and_table_are_up_to_date(architecture):
    assert architecture.main(["--check"]) == 0


def test_functions_of_the_table_that_do_not_exist_are_named(architecture):
    rows = re.findall(r"^\| `[\w/]+\.py` \| `\w+` \|", architecture.PAGE.read_text(), re.M)
    assert len(rows) > 15
    assert architecture.missing_names("| `distill/losses/logits.py` | `forward_kl` | exists |") == []
    assert architecture.missing_names("| `distill/losses/logits.py` | `no_kl` | |\n| `no.py` | `f` | |") == [
        "distill/losses/logits.py: no_kl",
        "no.py: f",
    ]


def test_imports_between_packages_are_found(architecture):
    arrows = architecture.imports_between_packages()
    assert "distill.losses" in arrows["distill.models"]
    assert not {package for others in arrows.values() for package in others if package == "pipelines"}
    assert all(package.count(".") <= 1 for package in arrows)


def test_a_stale_picture_and_a_missing_function_fail_the_check(architecture, tmp_path, monkeypatch, capsys):
    page, picture = tmp_path / "page.md", tmp_path / "packages.svg"
    page.write_text(f"{architecture.BEGIN}{architecture.END}\n| `no.py` | `f` | |\n")
    monkeypatch.setattr(architecture, "PAGE", page)
    monkeypatch.setattr(architecture, "PICTURE", picture)
    monkeypatch.setattr(architecture, "page_with_table", lambda: page.read_text())
    monkeypatch.setattr(architecture, "ROOT", tmp_path)
    monkeypatch.setattr(architecture, "picture", lambda: "<svg/>")
    assert architecture.main(["--check"]) == 1
    message = capsys.readouterr().err
    assert "page.md: names no.py: f, which doesn't exist" in message
    assert "packages.svg: differs from the code" in message


def test_a_page_without_marks_is_rejected(architecture, tmp_path, monkeypatch):
    monkeypatch.setattr(architecture, "PAGE", tmp_path / "page.md")
    architecture.PAGE.write_text("no marks\n")
    with pytest.raises(ValueError, match="the table of packages has no place"):
        architecture.page_with_table()


GRAPH = {"top": ["middle", "left", "bottom"], "middle": ["bottom"], "left": ["bottom"], "bottom": []}


def test_arrows_that_follow_from_others_are_left_out(drawing):
    reduced = drawing.without_shortcuts(GRAPH)
    assert reduced == {"top": ["middle", "left"], "middle": ["bottom"], "left": ["bottom"], "bottom": []}


def test_each_box_is_below_all_that_lead_to_it_and_long_arrows_pass_every_layer(drawing):
    layers, lanes = drawing.list_layers({"a": ["b", "d"], "b": ["c"], "c": [], "d": [], "e": ["c", "d"]})
    level = {name: number for number, layer in enumerate(layers) for name in layer}
    assert (level["a"], level["b"], level["c"], level["d"], level["e"]) == (0, 1, 2, 1, 0)
    (long,) = [lane for lane in lanes if lane[0] == "e" and lane[-1] == "c"]
    assert [level[name] for name in long] == [0, 1, 2]


def test_the_drawing_is_xml_with_a_box_for_each_node_and_no_two_boxes_overlap(drawing):
    boxes = [drawing.Box(name, "text & <text>", "#ffffff") for name in GRAPH]
    text = drawing.draw(boxes, GRAPH)
    assert text == drawing.draw(boxes, GRAPH)
    root = ElementTree.fromstring(text)
    drawn = [each for each in root.iter("{http://www.w3.org/2000/svg}rect") if each.get("rx")]
    assert len(drawn) == len(GRAPH)
    corners = [(float(each.attrib["x"]), float(each.attrib["y"])) for each in drawn]
    for number, (x, y) in enumerate(corners):
        for other_x, other_y in corners[:number]:
            assert abs(x - other_x) >= drawing.WIDTH or abs(y - other_y) >= drawing.HEIGHT
