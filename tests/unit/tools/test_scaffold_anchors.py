"""The lines next to which `tools/scaffold.py` inserts its own are still in the repository."""

import sys

import pytest

from support.commands import ROOT

sys.path.insert(0, str(ROOT / "tools"))
from scaffold_kinds import KINDS, Edit

EDITS = [(kind, edit) for kind, each in KINDS.items() for edit in each.edits]


@pytest.mark.parametrize(("kind", "edit"), EDITS, ids=[f"{kind}-{edit.file}" for kind, edit in EDITS])
def test_an_anchor_occurs_once(kind: str, edit: Edit):
    lines = (ROOT / edit.file).read_text().splitlines()
    assert lines.count(edit.anchor) == 1, edit.anchor
    if edit.end is not None:
        assert edit.end in lines[lines.index(edit.anchor) :]
