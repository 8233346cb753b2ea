"""The columns that are detected by name."""

import re

from distill.data.sources.columns import LABEL, PAIR, SCORE, TEXT
from support.commands import ROOT


def test_the_names_in_the_docs_are_those_detected():
    page = (ROOT / "docs" / "howto" / "own-data.md").read_text()
    rows = page[page.index("| column | names |") :].split("\n\n")[0].splitlines()[2:]
    cells = (row.split("|") for row in rows)
    documented = {kind.strip(): tuple(re.findall(r"`(\w+)`", names)) for _, kind, names, _ in cells}
    assert documented == {"text": TEXT, "second text": PAIR, "label": LABEL, "number (regression)": SCORE}
