"""The maximum text length of a run, and checks of lengths against the models' positions."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from distill.data.config import SHORTEST, USUAL_LENGTH
from pipelines.settings.commands.distill import DistillConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from distill.tasks.task import Task

    Models = Mapping[str, tuple[PretrainedConfig, PreTrainedTokenizerBase]]  # role -> (config, tokenizer)


def fitted_length(length: int, task: "Task", models: "Models", *, room: int = 0) -> tuple[int, str]:
    """Returns the maximum text length in tokens, and a note for the user.

    The length is `length` if set, else the default or, if smaller, the number of positions of the model that has
    fewest. The note is empty unless texts are truncated at less than the length that was set or the default.

    Args:
        length: `data.max_length`; 0 to determine it here.
        task: Task; determines where texts are truncated.
        models: Role -> (config, tokenizer).
        room: Number of positions reserved for text generated after the input.

    Raises:
        InputError: The length exceeds the number of positions of a model.
    """
    from distill.tasks.positions import check_length, find_max_tokens

    fitted, note = length or USUAL_LENGTH, ""
    for role, (config, tokenizer) in models.items():
        max_tokens = find_max_tokens(config)
        if (
            not length
            and max_tokens is not None
            and SHORTEST <= max_tokens - room < task.max_row_length(tokenizer, fitted)
        ):
            fitted = max_tokens - room
            note = f"; texts are cut at {fitted} tokens: the {role} has {max_tokens} positions"
        check_length(task, config, tokenizer, fitted, role)
        if length and task.max_row_length(tokenizer, length) < length:
            limit = tokenizer.model_max_length
            note = f"; texts are cut at {limit} tokens, not {length}: the {role}'s tokenizer has that limit"
    return fitted, note


def check_lengths(settings: DistillConfig, configs: "Mapping[str, PretrainedConfig]") -> None:
    """Checks that the lengths in the settings, besides `data.max_length`, fit the models, given as role -> config.

    Raises:
        InputError: A length exceeds the number of positions of the teacher or the student.
    """
    from distill.tasks.positions import find_max_tokens, length_error

    lengths = {"general.length": settings.general.length} if settings.general.data else {}
    lengths |= {"budget.length": max(settings.budget.lengths)} if settings.budget.requested else {}
    if settings.on_policy.share:
        total = settings.on_policy.prompt_tokens + settings.on_policy.new_tokens
        lengths["on_policy.prompt_tokens and on_policy.new_tokens together"] = total
    for role, config in configs.items():
        max_tokens = find_max_tokens(config)
        for setting, length in lengths.items():
            if max_tokens is not None and length > max_tokens:
                raise length_error(setting, max_tokens, length, role)
