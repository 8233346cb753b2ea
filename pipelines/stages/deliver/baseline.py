"""The baseline scores, reached without a model, that a report lists beside the models' scores."""

import json
from pathlib import Path
from typing import Any

BASELINE = "baseline.json"  # in the evaluation's folder


def read_baseline(evaluation: Path) -> dict[str, Any]:
    """Reads an evaluation's baseline as a report entry; empty if there is none."""
    file = evaluation / BASELINE
    return {"baseline": json.loads(file.read_text())} if file.is_file() else {}
