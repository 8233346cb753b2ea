"""The task that a checkpoint was trained for, from the names in its config.json; this module doesn't import torch."""

from collections.abc import Iterable, Mapping

_HEADS: Mapping[str, str] = {  # class name suffix -> task; bodies and language-modelling heads are no trained task
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "PooledModel": "sentence-embedding",
}
CLASSIFICATION_HEAD = "ForSequenceClassification"  # for single-label, multi-label and regression
PROBLEMS: Mapping[str, str] = {
    "single_label_classification": "text-classification",
    "multi_label_classification": "multi-label",
    "regression": "regression",
}


def task_of_head(architectures: Iterable[str], problem: str | None, labels: int | None) -> str:
    """Returns the task that a checkpoint was trained for; empty for a pre-trained body or an ambiguous config.

    Args:
        architectures: `architectures` in its config.
        problem: `problem_type` in its config.
        labels: Number of labels of its head, if the config contains it.
    """
    for name in architectures:
        if name.endswith(CLASSIFICATION_HEAD):
            if problem is None and labels is None:
                return ""
            return PROBLEMS.get(problem or ("regression" if labels == 1 else "single_label_classification"), "")
        task = next((task for end, task in _HEADS.items() if name.endswith(end)), None)
        if task is not None:
            return task
    return ""


def same_head(task: str) -> str:
    """Returns a task that has the same kind of head."""
    return "text-classification" if task in PROBLEMS.values() else task
