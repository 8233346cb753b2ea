"""Reports of finished runs."""

import json
from pathlib import Path


def report_of(output: Path) -> dict:
    """Returns `report.json` of the run in an output folder."""
    return json.loads((output / "report.json").read_text())
