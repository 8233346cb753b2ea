"""How many tokens a model has positions for, and that rows aren't longer."""

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from distill.errors import InputError
from distill.tasks.task import Task

# Their first token has the position after that of the padding.
SHIFTED = ("roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "camembert", "data2vec-text", "esm",
           "ibert", "longformer", "luke", "mpnet", "xmod")  # fmt: skip


def positions_of(config: PretrainedConfig) -> int | None:
    """Most tokens of a row; None where the config doesn't tell, or where positions are relative or stretched."""
    most = getattr(config, "max_position_embeddings", None)
    rotary = getattr(config, "rope_parameters", None)
    relative = getattr(config, "alibi", False) or not getattr(config, "position_biased_input", True)
    kind = getattr(config, "position_embedding_type", None) or "absolute"
    if not isinstance(most, int) or most < 1 or relative or kind != "absolute":
        return None
    if rotary and rotary.get("rope_type") != "default":
        return None
    return most - (config.pad_token_id or 0) - 1 if config.model_type in SHIFTED else most


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
