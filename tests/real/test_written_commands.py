"""Every recipe in configs/ and every command in README.md and docs/ runs as written, on the real MiniLM.

The data is a slice of the real data, epochs and measurements are reduced, and files that the documents leave to the
reader (`my_texts/`, `my_llama/`) are provided: see `checkout.py`.
"""

import re
from pathlib import Path

import pytest

from real.checkout import DEMO, SMALL_LM, TAGGER, Checkout
from real.documents import DOCUMENTS, ROOT, commands_of

RECIPES = sorted((ROOT / "configs").rglob("*.yaml"))
OWN = {"demo": DEMO, "small-lm": SMALL_LM, "tagger": TAGGER}


def command_of(recipe: Path) -> str:
    path = recipe.relative_to(ROOT)
    return OWN.get(recipe.stem, f"python -m pipelines.distill --config {path} --output runs/of-{recipe.stem}")


WRITTEN = [line for document in DOCUMENTS for line in commands_of(document) if line != "make test"]
COMMANDS = list(dict.fromkeys([*map(command_of, RECIPES), *WRITTEN]))


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("line", COMMANDS)
def test_a_documented_command_completes(line: str, checkout: Checkout):
    done = checkout.run(line)
    assert done.code == 0, done.output
    assert "Traceback" not in done.output, done.output
    output = re.search(r"--(?:output|cache) (\S+)", line)
    if output and "--dry-run" not in line:
        assert any((checkout.root / output[1]).iterdir())
