"""The tasks: for each one the meaning of a model's outputs, the scores, and the stock class of the model.

Public names are imported on first use, so that importing this package loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distill.tasks.choose import TASKS
    from distill.tasks.language import CausalLM, ChatTask, MaskedLM
    from distill.tasks.question_answering import QuestionAnswering
    from distill.tasks.scorer import Scorer
    from distill.tasks.sentence_embedding import SentenceEmbedding
    from distill.tasks.task import Task
    from distill.tasks.text_classification import MultiLabel, Regression, TextClassification
    from distill.tasks.token_classification import TokenClassification

EXPORTS = {
    "CausalLM": "language",
    "ChatTask": "language",
    "MaskedLM": "language",
    "MultiLabel": "text_classification",
    "QuestionAnswering": "question_answering",
    "Regression": "text_classification",
    "Scorer": "scorer",
    "SentenceEmbedding": "sentence_embedding",
    "TASKS": "choose",
    "Task": "task",
    "TextClassification": "text_classification",
    "TokenClassification": "token_classification",
}
__all__ = [
    "CausalLM",
    "ChatTask",
    "MaskedLM",
    "MultiLabel",
    "QuestionAnswering",
    "Regression",
    "Scorer",
    "SentenceEmbedding",
    "TASKS",
    "Task",
    "TextClassification",
    "TokenClassification",
]


def __getattr__(name: str) -> object:
    if name in EXPORTS:
        return getattr(import_module(f"{__name__}.{EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
