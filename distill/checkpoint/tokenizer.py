"""Loading of a checkpoint's tokenizer, and checks that it matches the model."""

from pathlib import Path

from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from distill.checkpoint.config import check_config, in_one_line
from distill.errors import InputError

TOKENIZER = "tokenizer.json"
_SETTINGS = "tokenizer_config.json"
REQUIRED = ("vocab_file", "merges_file")  # among the files that a slow tokenizer's class names


def load_tokenizer(folder: Path, role: str = "teacher") -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a checkpoint; a missing padding token is set to the config's, else to the eos token.

    Raises:
        InputError: The folder contains no tokenizer, or a damaged one.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # the tokenizers library raises plain Exception for a damaged file
        raise InputError(
            f"{role} {str(folder)!r}: no tokenizer can be loaded from the folder: {in_one_line(error)}"
        ) from error
    _check_files(tokenizer, folder, role)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = _find_token(tokenizer, _read_padding_id(folder)) or tokenizer.eos_token
    return tokenizer


def _check_files(tokenizer: PreTrainedTokenizerBase, folder: Path, role: str) -> None:
    """Checks that the folder has the files of a tokenizer.

    Raises:
        InputError: There is no vocabulary, in which case transformers builds a tokenizer with only special tokens.
    """
    if (folder / TOKENIZER).is_file():
        return
    files = [name for key, name in type(tokenizer).vocab_files_names.items() if key in REQUIRED] or [_SETTINGS]
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise InputError(
            f"{role} {str(folder)!r}: no tokenizer can be loaded from the folder: expected {TOKENIZER} or "
            f"{' and '.join(files)}, found no {' and no '.join(missing)}: every token would be unknown"
        )


def _read_padding_id(folder: Path) -> int | None:
    return check_config(folder).get("pad_token_id") if (folder / "config.json").is_file() else None


def _find_token(tokenizer: PreTrainedTokenizerBase, number: int | None) -> str | None:
    """Returns the token with this id; None if there is none, for example for the -1 of the first Llama models."""
    if not isinstance(number, int) or not 0 <= number < len(tokenizer):
        return None
    return str(tokenizer.convert_ids_to_tokens(number))


def check_fast(tokenizer: PreTrainedTokenizerBase, role: str, consequence: str) -> None:
    """Checks that the tokenizer is fast.

    Args:
        tokenizer: The tokenizer.
        role: Its role in the command, for the message.
        consequence: What can't be computed with a slow tokenizer, for the message.

    Raises:
        InputError: The tokenizer is written in Python, and exposes neither its rules nor the offsets of its tokens.
    """
    if not tokenizer.is_fast:
        raise InputError(
            f"{role} {tokenizer.name_or_path!r}: expected a fast tokenizer (one with {TOKENIZER}), found the slow "
            f"{type(tokenizer).__name__}: {consequence}"
        )


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, folder: Path, role: str) -> None:
    """Checks that the model has an embedding for every token.

    Raises:
        InputError: The tokenizer has ids beyond the rows of the model's embeddings.
    """
    rows = getattr(config.get_text_config(), "vocab_size", None)
    if not isinstance(rows, int):
        return
    beyond = {number: token for token, number in tokenizer.get_vocab().items() if number >= rows}
    if beyond:
        first = min(beyond)
        raise InputError(
            f"{role} {str(folder)!r}: expected a tokenizer with ids below {rows}, the rows of the model's embeddings, "
            f"found {len(beyond)} beyond ({beyond[first]!r} is {first}): the model can't embed texts that contain "
            "them, or a mask token among them; resize its embeddings (resize_token_embeddings), or use the tokenizer "
            "that it was trained with"
        )


def set_padding_id(config: PretrainedConfig, folder: Path) -> None:
    """Sets a decoder's config to the padding id of the tokenizer in its folder; encoders exclude padding by the mask.

    The stock classifier of a decoder reads the last token that isn't the config's padding: it rejects batches if no
    padding is configured, and reads a padding position if rows are padded with a different id.

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
            "classifier couldn't find the end of a text"
        )
    config.pad_token_id = tokenizer.pad_token_id
