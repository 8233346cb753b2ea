"""Check that rows are not longer than a model's maximum number of positions."""

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from distill.checkpoint.positions import find_max_tokens
from distill.errors import InputError
from distill.tasks.task import Task

__all__ = ["check_length", "find_max_tokens", "length_error"]


def check_length(
    task: Task, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, length: int, model: str
) -> None:
    """Checks that the rows fit the model's positions.

    Raises:
        InputError: Rows of the task's maximum length for `data.max_length` exceed the model's positions.
    """
    limit, found = find_max_tokens(config), task.max_row_length(tokenizer, length)
    if limit is not None and found > limit:
        raise length_error("data.max_length", limit, found, model)


def length_error(setting: str, limit: int, found: int, model: str) -> InputError:
    """Returns the error for rows of `found` tokens that exceed the `limit` of a model's positions."""
    return InputError(
        f"{setting}: expected at most {limit} tokens, the positions of the {model}, found {found}: the model has no "
        "positions for the tokens beyond them"
    )
