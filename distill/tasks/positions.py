"""That rows aren't longer than a model has positions for."""

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from distill.checkpoint.positions import positions_of
from distill.errors import InputError
from distill.tasks.task import Task

__all__ = ["check_length", "positions_of", "too_long"]


def check_length(
    task: Task, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, length: int, model: str
) -> None:
    """
    Raises:
        InputError: Rows of `data.max_length` tokens, as far as the task cuts them there, are longer than the model.
    """
    most, found = positions_of(config), task.longest(tokenizer, length)
    if most is not None and found > most:
        raise too_long("data.max_length", most, found, model)


def too_long(setting: str, most: int, found: int, model: str) -> InputError:
    return InputError(
        f"{setting}: expected at most {most} tokens, the positions of the {model}, found {found}: tokens beyond them "
        "have no place in the model"
    )
