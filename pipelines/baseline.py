"""The scores of answering without a model, beside which a model's are read."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distill.data.batches import Rows
    from distill.data.splits import Splits
    from distill.tasks.task import Task

BASELINE = "baseline.json"  # beside the evaluation


def baseline_scores(task: "Task", splits: "Splits", encoded: tuple["Rows", int]) -> dict[str, Any] | None:
    """Name, answer and scores on the test split of the one answer that train suggests; None of a task without one, or
    where no score of it is defined. Scores are None where they aren't, as a correlation with a constant.
    """
    from pipelines.evaluate import scored

    baseline = task.baseline(splits.train)
    if baseline is None:
        return None
    scorer = scored(lambda given: baseline.logits(*given["input_ids"].shape), task, encoded, task.at_once)
    scores = {name: score if math.isfinite(score) else None for name, score in scorer.scores().items()}
    return {"name": baseline.name, "answer": baseline.answer, "scores": scores}


def read_baseline(evaluation: Path) -> dict[str, Any]:
    """What an evaluation says of it, for a report: empty where it says nothing."""
    file = evaluation / BASELINE
    return {"baseline": json.loads(file.read_text())} if file.is_file() else {}
