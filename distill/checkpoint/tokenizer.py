"""Loading of a checkpoint's tokenizer, and checks that it matches the model."""

from pathlib import Path

from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from distill.checkpoint.config import check_config, in_one_line
from distill.errors import InputError

WHOLE = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
NEEDED = ("vocab_file", "merges_file")  # required among the files that a tokenizer class names


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
    check_tokenizer_files(tokenizer, folder, role)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = token_of(tokenizer, configured_padding(folder)) or tokenizer.eos_token
    return tokenizer


def check_tokenizer_files(tokenizer: PreTrainedTokenizerBase, folder: Path, role: str) -> None:
    """Checks that the folder has the files of a tokenizer.

    Raises:
        InputError: There is no vocabulary, in which case transformers builds a tokenizer with only special tokens.
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
    """Returns the token with this id; None if there is none, for example for the -1 of the first Llama models."""
    if not isinstance(number, int) or not 0 <= number < len(tokenizer):
        return None
    return str(tokenizer.convert_ids_to_tokens(number))


def check_fast(tokenizer: PreTrainedTokenizerBase, role: str, why: str) -> None:
    """Checks that the tokenizer is fast.

    Args:
        why: Why a fast tokenizer is required, for the message.

    Raises:
        InputError: The tokenizer is written in Python, and exposes neither its rules nor the offsets of its tokens.
    """
    if not tokenizer.is_fast:
        raise InputError(
            f"{role} {tokenizer.name_or_path!r}: expected a fast tokenizer (one with {WHOLE}), found the slow "
            f"{type(tokenizer).__name__}: {why}"
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
            f"found {len(beyond)} beyond ({beyond[first]!r} is {first}): texts with them, or masks, can't be read; "
            "give the model rows for all (resize_token_embeddings), or it the tokenizer it was trained with"
        )


def agree_on_padding(config: PretrainedConfig, folder: Path) -> None:
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
            "classifier couldn't tell where a text ends"
        )
    config.pad_token_id = tokenizer.pad_token_id
