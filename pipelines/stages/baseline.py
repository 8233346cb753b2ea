"""The scores of answering without a model, beside which a model's are read."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass

BASELINE = "baseline.json"  # beside the evaluation


def read_baseline(evaluation: Path) -> dict[str, Any]:
    """What an evaluation says of it, for a report: empty where it says nothing."""
    file = evaluation / BASELINE
    return {"baseline": json.loads(file.read_text())} if file.is_file() else {}
