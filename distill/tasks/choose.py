"""Choice of a run's task: as the user requests, by the teacher's head, or by the columns of the dataset."""

from pathlib import Path

import pyarrow as pa
from transformers import PretrainedConfig

from distill.checkpoint.head_task import task_of_head
from distill.data.config import DataConfig
from distill.data.rows.chat import INSTRUCTION, MESSAGES, PROMPT
from distill.data.rows.questions import ANSWERS, CONTEXT, QUESTION
from distill.data.rows.sentences import LINES, NUMBER
from distill.data.rows.tagged import TAGS, WORDS
from distill.data.sources.cells import hold_fractions, hold_lists, hold_numbers
from distill.data.sources.columns import LABEL, PAIR, SCORE, find_column
from distill.data.sources.tables import read_splits
from distill.data.sources.text_files import find_text_files
from distill.errors import InputError
from distill.tasks.language import CausalLM, ChatTask, Language, MaskedLM
from distill.tasks.question_answering import QuestionAnswering
from distill.tasks.sentence_embedding import SentenceEmbedding
from distill.tasks.task import BODIES, Task
from distill.tasks.text_classification import MultiLabel, Regression, TextClassification
from distill.tasks.token_classification import TokenClassification

TASKS: dict[str, type[Task]] = {
    "text-classification": TextClassification,
    "multi-label": MultiLabel,
    "regression": Regression,
    "token-classification": TokenClassification,
    "question-answering": QuestionAnswering,
    "masked-lm": MaskedLM,
    "causal-lm": CausalLM,
    "chat": ChatTask,
    "sentence-embedding": SentenceEmbedding,
}
CLASSIFICATION = {TextClassification.name, "multi-label"}  # these differ only in how the same logits are interpreted
_PLAIN_TEXT_TASKS: tuple[type[Language], ...] = (MaskedLM, CausalLM)


def choose_task(requested: str, teacher: PretrainedConfig, name: str, data: DataConfig) -> tuple[str, str]:
    """Returns (name of the task in TASKS, reason for the choice).

    Args:
        requested: Name of the task that the user requests, or `auto`.
        teacher: The teacher's config.
        name: The teacher's name, for the message.
        data: The data set, by which the task is chosen if neither the user nor the teacher's head determines it.

    Raises:
        InputError: The teacher's head belongs to a task other than the requested one, or to no supported task.
    """
    trained = find_task_of_head(teacher, name)
    if requested == "auto":
        return (trained, "the teacher's head") if trained else _infer_task_from_data(teacher, data)
    if trained and TASKS[requested].head != TASKS[trained].head:
        raise InputError(
            f"--task {requested}: the teacher {name!r} was trained for {trained}: its outputs have another meaning"
        )
    if teacher.problem_type and {requested, trained} == CLASSIFICATION:
        raise InputError(
            f"--task {requested}: expected a head for it, found that of the teacher {name!r} trained for {trained} "
            f"(problem_type {teacher.problem_type} in config.json): the same logits would be interpreted differently"
        )
    return requested, "--task"


def find_task_of_head(teacher: PretrainedConfig, name: str) -> str:
    """Returns the task that the checkpoint was trained for.

    Empty for a pre-trained body, with or without a language-modelling head.

    Raises:
        InputError: The head belongs to no supported task.
    """
    architectures = teacher.architectures or []
    if task := task_of_head(architectures, teacher.problem_type, teacher.num_labels):
        return task
    if unknown := next((each for each in architectures if not each.endswith(BODIES)), None):
        raise InputError(
            f"teacher {name!r}: expected a pre-trained body or a head for {', '.join(TASKS)}, found "
            f"{unknown}: it was trained for another task"
        )
    return ""


def find_language_task(teacher: PretrainedConfig) -> str:
    """Returns the plain-text language task that the checkpoint has a head for; empty if it has no such head."""
    names = teacher.architectures or []
    return next((kind.name for kind in _PLAIN_TEXT_TASKS if any(name.endswith(kind.heads) for name in names)), "")


def _infer_task_from_data(teacher: PretrainedConfig, config: DataConfig) -> tuple[str, str]:
    """Returns (task, reason) inferred from the dataset; text without labels is a language-modelling task."""
    language = find_language_task(teacher)
    if language and find_text_files(config.path):
        return language, "txt files, and the teacher's language-modelling head"
    if (Path(config.path).expanduser() / LINES).is_file():
        return SentenceEmbedding.name, f"{LINES}, and pairs to evaluate on"
    return _infer_task_from_columns(read_splits(config.path, config.subset)["train"], config, language)


def _infer_task_from_columns(train: pa.Table, config: DataConfig, language: str) -> tuple[str, str]:
    """Returns (task, reason); `language` is the task of the teacher's language-modelling head, empty without one."""
    turns = next((name for names in (MESSAGES, PROMPT, INSTRUCTION) if (name := find_column(train, names))), None)
    if turns and language == CausalLM.name:
        return ChatTask.name, f"column {turns}, and the teacher's language-modelling head"
    words, tags = find_column(train, WORDS), find_column(train, TAGS)
    tagged = words and tags and config.text in (None, words)
    if tagged and all(hold_lists(train[each].to_pylist()) for each in (words, tags)):
        return TokenClassification.name, f"columns {words} and {tags} contain lists"
    question, context, answers = (find_column(train, names) for names in (QUESTION, CONTEXT, ANSWERS))
    if question and context and answers and config.label in (None, answers):
        return QuestionAnswering.name, f"columns {question}, {context} and {answers}"
    label = config.label if config.label in train.column_names else find_column(train, LABEL)
    if label is None:
        if find_column(train, PAIR) and (config.label or find_column(train, NUMBER)):
            return SentenceEmbedding.name, "pairs of texts with a number"
        score = find_column(train, SCORE) if config.label is None else None
        if score and hold_numbers(train[score].to_pylist()):
            return "regression", f"column {score} contains numbers"
        plain = language and (config.text or "text") in train.column_names and config.label is None
        return (language, "text without labels") if plain else (TextClassification.name, "the data")
    cells = train[label].to_pylist()
    if hold_lists(cells):
        return "multi-label", f"column {label} contains lists"
    if hold_fractions(cells):
        return "regression", f"column {label} contains fractions"
    return TextClassification.name, f"column {label} contains classes"
