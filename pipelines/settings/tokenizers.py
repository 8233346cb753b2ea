"""The tokenizers of a run's models: their checks, and students whose tokenizer differs from the teacher's."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipelines.settings.commands.distill import DistillConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from distill.checkpoint.checkpoint import Checkpoint
    from distill.data.batches.batches import EncodedRows
    from distill.tasks.task import Task

CROSS_TOKENIZER_TASKS = (
    "causal-lm",
    "masked-lm",
)  # tasks in which the student's tokenizer may differ from the teacher's


def load_checked_tokenizer(checkpoint: "Checkpoint", task: "Task") -> "PreTrainedTokenizerBase":
    """Returns the tokenizer of a checkpoint, configured for the task.

    Raises:
        InputError: There is no tokenizer, it has tokens without embeddings in the model, or it doesn't support the
            task.
    """
    from distill.checkpoint.tokenizer import check_vocabulary

    tokenizer = checkpoint.load_tokenizer()
    check_vocabulary(tokenizer, checkpoint.config, checkpoint.folder, checkpoint.role)
    task.check_tokenizer(tokenizer)
    task.configure_tokenizer(tokenizer, checkpoint.folder)
    return tokenizer


def is_cross_tokenizer(
    settings: DistillConfig, teacher: "PreTrainedTokenizerBase", student: "PreTrainedTokenizerBase"
) -> bool:
    """Returns whether the student's tokenizer differs from its teacher's, in a task that supports it."""
    from distill.teacher.fingerprint import tokenizer_fingerprint

    return settings.task in CROSS_TOKENIZER_TASKS and tokenizer_fingerprint(teacher) != tokenizer_fingerprint(student)


def build_cross_tokenizer_rows(
    settings: DistillConfig,
    student: "PreTrainedTokenizerBase",
    teacher: "PreTrainedTokenizerBase",
    texts: Sequence[str],
    length: int,
) -> "EncodedRows":
    """Returns the texts in the student's tokens, `length` per row, each with the same text in the teacher's tokens.

    Raises:
        InputError: The tokenizers can't be aligned; a tokenizer has no end token or, for masked-lm, no mask token; or
            the lengths leave no room for text.
    """
    from distill.data.alignment.encoded import encode_aligned
    from distill.data.masking.twice_masked import MaskedAlignedRows

    rows = encode_aligned(student, teacher, texts, length, settings.data.max_length)
    return MaskedAlignedRows.build(rows, settings.masking, student, teacher) if settings.task == "masked-lm" else rows
