"""Saving and loading of pruned models; modelling code in a checkpoint must be identical to this package's own."""

import hashlib
import re
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedModel

from distill.checkpoint.config import read_object
from distill.checkpoint.pruned import modeling_pruned
from distill.checkpoint.pruned.model import is_pruned
from distill.checkpoint.readers import reader_of
from distill.checkpoint.weights import load_model
from distill.errors import InputError

CODE = Path(modeling_pruned.__file__)


def save_pruned(model: PreTrainedModel, folder: Path) -> None:
    """Writes weights and config, with modeling_pruned.py beside them unless the model is of a stock class.

    Raises:
        InputError: The written code differs from this package's, as for a model loaded from a folder of another
            version; the checkpoint is written, but `load_pruned` would reject it.
    """
    model.save_pretrained(folder)
    if is_pruned(model):
        check_code(folder)


def auto_class_of(config: dict[str, Any]) -> str:
    """Returns the name of the auto class for a checkpoint's head, from the content of its config.json."""
    for name in config.get("architectures") or []:
        found = re.search(r"For[A-Z]\w+$|LMHeadModel$|Model$", name)
        if found:
            return {"LMHeadModel": "AutoModelForCausalLM", "Model": "AutoModel"}.get(
                found.group(), f"AutoModel{found.group()}"
            )
    return "AutoModelForSequenceClassification"


def load_pruned(folder: Path, auto_class: str = "") -> PreTrainedModel:
    """Loads the model in `folder`, stock or pruned, in eval mode.

    No code in the folder is executed: modeling_pruned.py must be byte-identical to the package's own file, and the
    latter is used.

    Args:
        folder: A folder written by `save_pruned`.
        auto_class: Name of the auto class for the model's head; inferred from the checkpoint by default, which may have
            a reader of its own (see `distill.checkpoint.readers`).

    Raises:
        InputError: The folder's code differs from the package's, the checkpoint has another head, or the auto class
            is unknown.
        InputError: Weights are missing or have another shape.
    """
    reads = None if auto_class else reader_of(folder)
    if reads is not None:
        return load_model(reads, folder, new_head=True).eval()  # the reader's pooling doesn't use the body's pooler
    config = read_object(folder, "model")
    auto_class = auto_class or auto_class_of(config)
    loader = getattr(transformers, auto_class, None)
    if loader is None:
        raise InputError(f"{auto_class}: transformers has no such class to load {folder} with")
    if "auto_map" in config:
        check_code(folder)
        loader = pruned_class(config["auto_map"], auto_class, folder)
    return load_model(loader, folder, new_head=auto_class == "AutoModel").eval()


def register_pruned(folder: Path) -> None:
    """Registers the classes of the pruned model in `folder` with this process's auto classes, using the package's code.

    Does nothing for a stock checkpoint.

    Raises:
        InputError: The folder's code differs from this package's.
    """
    config = read_object(folder, "model")
    if "auto_map" not in config:
        return
    check_code(folder)
    for auto_class in config["auto_map"].keys() - {"AutoConfig"}:
        model = pruned_class(config["auto_map"], auto_class, folder)
        known: Any = model.config_class
        transformers.AutoConfig.register(known.model_type, known, exist_ok=True)
        getattr(transformers, auto_class).register(known, model, exist_ok=True)


def check_code(folder: Path) -> None:
    """Checks that the folder's modelling code is identical to this package's."""
    path = folder / CODE.name
    ours = sha256(CODE)
    theirs = sha256(path) if path.is_file() else "no such file"
    if ours != theirs:
        raise InputError(
            f"{path}: expected the code that this package ships (SHA-256 {ours[:16]}), found {theirs[:16]}: it could "
            "do anything, and is not run"
        )


def pruned_class(auto_map: dict[str, str], auto_class: str, folder: Path) -> type[PreTrainedModel]:
    """Returns the package's class that `auto_map` specifies for the auto class."""
    code, _, name = auto_map.get(auto_class, "").rpartition(".")
    found = getattr(modeling_pruned, name, None) if code == CODE.stem else None
    if found is None:
        raise InputError(f"{folder}: expected a model for {auto_class}, found {auto_map}")
    return found


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
