"""Check that rows are not longer than a model's maximum number of positions."""

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from distill.checkpoint.positions import positions_of
from distill.errors import InputError
from distill.tasks.task import Task

__all__ = ["check_length", "positions_of", "too_long"]


def check_length(
    task: Task, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, length: int, model: str
) -> None:
    """Checks that the rows fit the model's positions.

    Raises:
        InputError: Rows of the task's maximum length for `data.max_length` exceed the model's positions.
    """
    most, found = positions_of(config), task.longest(tokenizer, length)
    if most is not None and found > most:
        raise too_long("data.max_length", most, found, model)


def too_long(setting: str, most: int, found: int, model: str) -> InputError:
    return InputError(
        f"{setting}: expected at most {most} tokens, the positions of the {model}, found {found}: tokens beyond them "
        "have no place in the model"
    )
