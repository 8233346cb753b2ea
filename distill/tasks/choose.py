"""Choice of a run's task: as the user requests, by the teacher's head, or by the columns of the dataset."""

from pathlib import Path

import pyarrow as pa
from transformers import PretrainedConfig

from distill.data.config import DataConfig
from distill.data.rows.chat import INSTRUCTION, MESSAGES, PROMPT
from distill.data.rows.questions import ANSWERS, CONTEXT, QUESTION
from distill.data.rows.sentences import LINES, NUMBER
from distill.data.rows.tagged import TAGS, WORDS
from distill.data.sources.cells import hold_fractions, hold_lists, hold_numbers
from distill.data.sources.columns import LABEL, PAIR, SCORE, first_of
from distill.data.sources.tables import read_splits
from distill.data.sources.text_files import text_files
from distill.errors import InputError
from distill.tasks.language import CausalLM, Chatting, Language, MaskedLM
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
    "chat": Chatting,
    "sentence-embedding": SentenceEmbedding,
}
PROBLEMS: dict[str | None, str] = {kind.problem: name for name, kind in TASKS.items() if kind.problem}
CLASSES = {TextClassification.name, "multi-label"}  # these differ only in how the same logits are interpreted
LANGUAGE_TASKS: tuple[type[Language], ...] = (MaskedLM, CausalLM)


def choose(asked: str, teacher: PretrainedConfig, name: str, data: DataConfig) -> tuple[str, str]:
    """Returns (name of the task in TASKS, reason for the choice).

    Raises:
        InputError: The teacher's head belongs to a task other than the requested one, or to no supported task.
    """
    own, why = by_head(teacher, name), "the teacher's head"
    if own == "" and asked == "auto":
        return by_data(teacher, data)
    if asked == "auto":
        return own, why
    if own and TASKS[asked].head != TASKS[own].head:
        raise InputError(
            f"--task {asked}: the teacher {name!r} was trained for {own}: its outputs have another meaning"
        )
    if teacher.problem_type and {asked, own} == CLASSES:
        raise InputError(
            f"--task {asked}: expected a head for it, found that of the teacher {name!r} trained for {own} "
            f"(problem_type {teacher.problem_type} in config.json): the same logits would be read in another way"
        )
    return asked, "--task"


def by_head(teacher: PretrainedConfig, name: str) -> str:
    """Returns the task that the checkpoint was trained for; empty for a pre-trained body, with or without a
    language-modelling head.
    """
    for architecture in teacher.architectures or []:
        if architecture.endswith(TextClassification.head):
            problem = teacher.problem_type or ("regression" if teacher.num_labels == 1 else None)
            return PROBLEMS.get(problem, TextClassification.name)
        if architecture.endswith(BODIES):
            continue
        for task, kind in TASKS.items():
            if architecture.endswith(kind.head):
                return task
        raise InputError(
            f"teacher {name!r}: expected a pre-trained body or a head for {', '.join(TASKS)}, found "
            f"{architecture}: it was trained for another task"
        )
    return ""


def language_of(teacher: PretrainedConfig) -> str:
    """Returns the plain-text language task that the checkpoint has a head for; empty if it has no such head."""
    names = teacher.architectures or []
    return next((kind.name for kind in LANGUAGE_TASKS if any(name.endswith(kind.heads) for name in names)), "")


def by_data(teacher: PretrainedConfig, config: DataConfig) -> tuple[str, str]:
    """Returns (task, reason) inferred from the dataset; text without labels is a language-modelling task."""
    own = language_of(teacher)
    if own and text_files(config.path):
        return own, "txt files, and the teacher's head for words"
    if (Path(config.path).expanduser() / LINES).is_file():
        return SentenceEmbedding.name, f"{LINES}, and pairs to measure on"
    return by_columns(read_splits(config.path, config.subset)["train"], config, own)


def by_columns(train: pa.Table, config: DataConfig, words_head: str) -> tuple[str, str]:
    turns = next((name for names in (MESSAGES, PROMPT, INSTRUCTION) if (name := first_of(train, names))), None)
    if turns and words_head == CausalLM.name:
        return Chatting.name, f"column {turns}, and the teacher's head for words"
    words, tags = first_of(train, WORDS), first_of(train, TAGS)
    tagged = words and tags and config.text in (None, words)
    if tagged and all(hold_lists(train[each].to_pylist()) for each in (words, tags)):
        return TokenClassification.name, f"columns {words} and {tags} hold lists"
    question, context, answers = (first_of(train, names) for names in (QUESTION, CONTEXT, ANSWERS))
    if question and context and answers and config.label in (None, answers):
        return QuestionAnswering.name, f"columns {question}, {context} and {answers}"
    label = config.label if config.label in train.column_names else first_of(train, LABEL)
    if label is None:
        if first_of(train, PAIR) and (config.label or first_of(train, NUMBER)):
            return SentenceEmbedding.name, "pairs of texts with a number"
        score = first_of(train, SCORE) if config.label is None else None
        if score and hold_numbers(train[score].to_pylist()):
            return "regression", f"column {score} holds numbers"
        plain = words_head and (config.text or "text") in train.column_names and config.label is None
        return (words_head, "text without labels") if plain else (TextClassification.name, "the data")
    cells = train[label].to_pylist()
    if hold_lists(cells):
        return "multi-label", f"column {label} holds lists"
    if hold_fractions(cells):
        return "regression", f"column {label} holds fractions"
    return TextClassification.name, f"column {label} holds classes"
