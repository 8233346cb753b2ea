"""Reading and checks of a checkpoint's config.json; this module doesn't import torch."""

import difflib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill.errors import InputError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CONFIG_FILE = "config.json"
# Integer settings in the configs of stock families.
SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings",
    "intermediate_size", "num_key_value_heads", "type_vocab_size", "embedding_size", "head_dim", "n_embd", "n_layer",
    "n_head", "n_positions", "n_inner", "dim", "n_layers", "n_heads", "hidden_dim", "d_model",
)  # fmt: skip
POSITIVE = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size", "n_embd", "n_layer",
    "n_head", "dim", "n_layers", "n_heads", "d_model",
)  # fmt: skip


def check_config(folder: Path, role: str = "model") -> dict[str, Any]:
    """Reads and checks `config.json` in `folder` and returns its content.

    Raises:
        InputError: The file can't be read, isn't a JSON object, names no known `model_type`, has a size that isn't a
            valid integer, or an invalid `auto_map` or `id2label`.
    """
    config = read_config_json(folder, role)
    if "model_type" not in config:
        keys = ", ".join(sorted(config)[:5])
        raise InputError(
            f"{role} {str(folder)!r}: expected a model_type such as 'bert' in config.json, found "
            f"{f'other keys ({keys})' if keys else 'an empty object'}: the kind of model is unknown"
        )
    _check_model_type(config, folder, role)
    _check_auto_map(config, folder, role)
    for name in SIZES:
        _check_size(name, config.get(name), folder, role)
    _check_label_names(config.get("id2label"), folder, role)
    return config


def read_config_json(folder: Path, role: str) -> dict[str, Any]:
    """Reads `config.json` in `folder`; its content is not checked.

    Raises:
        InputError: The file can't be read, or isn't a JSON object.
    """
    try:
        content = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{role} {str(folder)!r}: config.json can't be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{role} {str(folder)!r}: expected JSON in config.json, found other text ({error}): the kind of model is "
            "unknown"
        ) from error
    if not isinstance(content, dict):
        raise InputError(
            f"{role} {str(folder)!r}: expected a JSON object in config.json, found {_name_json_type(content)}: the "
            "kind of model is unknown"
        )
    return content


def _name_json_type(content: object) -> str:
    """Returns the name of a value's JSON type, with its article."""
    names = {list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(content), "a number")


def _check_model_type(config: dict[str, Any], folder: Path, role: str) -> None:
    model_type = config["model_type"]
    if not isinstance(model_type, str) or (not _is_known(model_type) and "auto_map" not in config):
        from transformers.models.auto.auto_mappings import CONFIG_MAPPING_NAMES

        nearest = difflib.get_close_matches(str(model_type), CONFIG_MAPPING_NAMES, 1)
        raise InputError(
            f"{role} {str(folder)!r}: expected a model_type in config.json that transformers knows, found "
            f"{model_type!r}" + (f"; the nearest is {nearest[0]!r}" if nearest else "")
        )


def _is_known(model_type: str) -> bool:
    """Returns whether transformers has a config class for this type, built in or registered in this process."""
    from transformers.models.auto.auto_mappings import CONFIG_MAPPING_NAMES

    if model_type in CONFIG_MAPPING_NAMES:
        return True
    # More types can be registered only if this module is already loaded; importing it here would import torch.
    loaded = sys.modules.get("transformers.models.auto.configuration_auto")
    return loaded is not None and model_type in loaded.CONFIG_MAPPING


def _check_auto_map(config: dict[str, Any], folder: Path, role: str) -> None:
    classes = config.get("auto_map", {})
    if not isinstance(classes, dict) or not all(isinstance(name, str) for name in classes.values()):
        raise InputError(
            f"{role} {str(folder)!r}: expected names of classes under auto_map in config.json, found {classes!r}"
        )


def _check_size(name: str, value: object, folder: Path, role: str) -> None:
    if value is None or isinstance(value, list):  # some families have one value per layer
        return
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    is_too_small = name in POSITIVE and isinstance(value, int) and value < 1
    if not is_integer or is_too_small:
        expected = "a whole number of at least 1" if name in POSITIVE else "a whole number"
        raise InputError(
            f"{role} {str(folder)!r}: expected {expected} for {name} in config.json, found {value!r}: no model can be "
            "built from it"
        )


def _check_label_names(names: object, folder: Path, role: str) -> None:
    if names is None or (isinstance(names, dict) and all(number.isdecimal() for number in names)):
        return
    raise InputError(
        f"{role} {str(folder)!r}: expected a name for the number of each label under id2label in config.json, found "
        f"{str(names)[:60]}: the label of each output is unknown"
    )


def load_config(folder: Path, role: str = "model") -> "PretrainedConfig":
    """Loads the checkpoint's config as an instance of its own class.

    Raises:
        InputError: As in `check_config`, or the class of this model type rejects a setting.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    check_config(folder, role)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
        raise InputError(
            f"{role} {str(folder)!r}: config.json is rejected by its class: {in_one_line(error)}"
        ) from error
    return config


def in_one_line(error: BaseException) -> str:
    """Returns the error's message without line breaks, or the error's type if there is no message."""
    return " ".join(str(error).split()) or type(error).__name__
