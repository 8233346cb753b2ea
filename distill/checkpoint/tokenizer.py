"""Loads the tokenizer of a checkpoint, and checks that its tokens are the model's."""

from pathlib import Path

from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from distill.checkpoint.config import check_config, in_one_line
from distill.errors import InputError

WHOLE = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
NEEDED = ("vocab_file", "merges_file")  # of the files that a tokenizer class names, those that it can't be without


def load_tokenizer(folder: Path, role: str = "teacher") -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a checkpoint; one without a padding token pads with the config's, else with its eos.

    Raises:
        InputError: The folder holds none, or one that is damaged.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # the tokenizers library raises Exception itself for a damaged file
        raise InputError(
            f"{role} {str(folder)!r}: no tokenizer can be loaded from the folder: {in_one_line(error)}"
        ) from error
    check_tokenizer_files(tokenizer, folder, role)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = token_of(tokenizer, configured_padding(folder)) or tokenizer.eos_token
    return tokenizer


def check_tokenizer_files(tokenizer: PreTrainedTokenizerBase, folder: Path, role: str) -> None:
    """
    Raises:
        InputError: The folder has no vocabulary: transformers makes up a tokenizer of special tokens alone then.
    """
    if (folder / WHOLE).is_file():
        return
    files = [name for key, name in type(tokenizer).vocab_files_names.items() if key in NEEDED] or [SETTINGS]
    lacking = [name for name in files if not (folder / name).is_file()]
    if lacking:
        raise InputError(
            f"{role} {str(folder)!r}: no tokenizer can be loaded from the folder: expected {WHOLE} or "
            f"{' and '.join(files)}, found no {' and no '.join(lacking)}: every word would be unknown"
        )


def configured_padding(folder: Path) -> int | None:
    return check_config(folder).get("pad_token_id") if (folder / "config.json").is_file() else None


def token_of(tokenizer: PreTrainedTokenizerBase, number: int | None) -> str | None:
    """The token with this id; None where there is none, as for the -1 of the first Llamas."""
    if not isinstance(number, int) or not 0 <= number < len(tokenizer):
        return None
    return str(tokenizer.convert_ids_to_tokens(number))


def check_fast(tokenizer: PreTrainedTokenizerBase, role: str, why: str) -> None:
    """
    Args:
        why: What takes a fast tokenizer, for the error.

    Raises:
        InputError: A tokenizer that is written in Python, which tells neither its rules nor the places of its tokens.
    """
    if not tokenizer.is_fast:
        raise InputError(
            f"{role} {tokenizer.name_or_path!r}: expected a fast tokenizer (one with {WHOLE}), found the slow "
            f"{type(tokenizer).__name__}: {why}"
        )


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, folder: Path, role: str) -> None:
    """
    Raises:
        InputError: Tokens beyond the rows of the model's embeddings.
    """
    rows = getattr(config.get_text_config(), "vocab_size", None)
    if not isinstance(rows, int):
        return
    beyond = {number: token for token, number in tokenizer.get_vocab().items() if number >= rows}
    if beyond:
        first = min(beyond)
        raise InputError(
            f"{role} {str(folder)!r}: expected a tokenizer with ids below {rows}, the rows of the model's embeddings, "
            f"found {len(beyond)} beyond ({beyond[first]!r} is {first}): texts with them, or masks, can't be read; "
            "give the model rows for all (resize_token_embeddings), or it the tokenizer it was trained with"
        )


def agree_on_padding(config: PretrainedConfig, folder: Path) -> None:
    """Has a decoder's config name the padding of the tokenizer in its folder; encoders leave padding out by the mask.

    A decoder's stock classifier reads the last token that isn't the config's padding: it refuses batches where there is
    none, and reads some padding where rows are filled up with another one.

    Raises:
        InputError: The tokenizer has neither a padding nor an eos token.
    """
    kind = config.model_type
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return
    tokenizer = load_tokenizer(folder, "model")
    if tokenizer.pad_token_id is None:
        raise InputError(
            f"model {str(folder)!r}: expected a tokenizer with a padding or an eos token, found neither: a "
            "classifier couldn't tell where a text ends"
        )
    config.pad_token_id = tokenizer.pad_token_id
