"""Which task a run is about: as the user says, as the teacher was trained, or as the data look."""

from typing import Any

import pyarrow as pa
from transformers import PretrainedConfig

from distill.data.columns import LABEL, first_of
from distill.data.config import DataConfig
from distill.data.source import read_splits
from distill.data.tagged import TAGS, WORDS
from distill.errors import InputError
from distill.tasks.task import BODIES, Task
from distill.tasks.text_classification import Numbers, Several, TextClassification
from distill.tasks.token_classification import TokenClassification

TASKS: dict[str, type[Task]] = {
    "text-classification": TextClassification,
    "multi-label": Several,
    "regression": Numbers,
    "token-classification": TokenClassification,
}
PROBLEMS: dict[str | None, str] = {kind.problem: name for name, kind in TASKS.items() if kind.problem}


def choose(asked: str, teacher: PretrainedConfig, name: str, data: DataConfig) -> tuple[str, str]:
    """(name of the task in TASKS, why).

    Raises:
        InputError: A teacher whose head is of another task than the one asked for, or of none that is known.
    """
    own, why = by_head(teacher, name), "the teacher's head"
    if own == "":
        own, why = by_data(read_splits(data.path, data.subset)["train"], data)
    if asked == "auto":
        return own, why
    kinds = TASKS[asked], TASKS[own]
    if why == "the teacher's head" and kinds[0].head != kinds[1].head:
        raise InputError(
            f"--task {asked}: the teacher {name!r} was trained for {own}: its outputs have another meaning"
        )
    return asked, "--task"


def by_head(teacher: PretrainedConfig, name: str) -> str:
    """What the checkpoint was trained for; empty for a pre-trained body."""
    for architecture in teacher.architectures or []:
        if architecture.endswith(TextClassification.head):
            problem = teacher.problem_type or ("regression" if teacher.num_labels == 1 else None)
            return PROBLEMS.get(problem, TextClassification.name)
        for task, kind in TASKS.items():
            if architecture.endswith(kind.head):
                return task
        if not architecture.endswith(BODIES):
            raise InputError(
                f"teacher {name!r}: expected a pre-trained body or a head for {', '.join(TASKS)}, found "
                f"{architecture}: it was trained for another task"
            )
    return ""


def by_data(train: pa.Table, config: DataConfig) -> tuple[str, str]:
    """What the columns of a split look like."""
    words, tags = first_of(train, WORDS), first_of(train, TAGS)
    if words and tags and is_list(train[words]) and is_list(train[tags]) and config.text in (None, words):
        return TokenClassification.name, f"columns {words} and {tags} hold lists"
    label = config.label if config.label in train.column_names else first_of(train, LABEL)
    if label is None:
        return TextClassification.name, "the data"
    column = train[label]
    if is_list(column):
        return "multi-label", f"column {label} holds lists"
    if pa.types.is_floating(column.type) and any(value is not None and value % 1 for value in column.to_pylist()):
        return "regression", f"column {label} holds fractions"
    return TextClassification.name, f"column {label} holds classes"


def is_list(column: Any) -> bool:
    return pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
