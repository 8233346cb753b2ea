"""Saving and loading of models, also of classes that transformers lacks; their code must be this package's own."""

import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import transformers
from transformers import PreTrainedModel

from distill.checkpoint.auto_class import AutoClass
from distill.checkpoint.config import read_config_json
from distill.checkpoint.custom_models import modeling_custom_norms, modeling_pruned, modeling_token_vectors
from distill.checkpoint.custom_models.model import has_custom_norms, has_token_vectors, is_pruned
from distill.checkpoint.digest import hash_file
from distill.checkpoint.readers import find_reader
from distill.checkpoint.weights import load_model
from distill.errors import InputError

HEADS = ("AutoModel", *(f"AutoModelFor{task}" for task in (
    "MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering", "MultipleChoice",
)))  # fmt: skip
SHIPPED = {
    module.__name__.rpartition(".")[2]: module
    for module in (modeling_pruned, modeling_custom_norms, modeling_token_vectors)
}


def save_model_folder(model: PreTrainedModel, folder: Path) -> None:
    """Writes weights and config, with its modelling code beside them unless the model is of a stock class.

    Raises:
        InputError: The written code differs from this package's, as for a model loaded from a folder of another
            version; the checkpoint is written, but `load_model_folder` would reject it.
    """
    model.save_pretrained(folder)
    if is_pruned(model):
        _check_code(folder)
    elif has_custom_norms(model):
        _check_code(folder, modeling_custom_norms)
    elif has_token_vectors(model):
        _check_code(folder, modeling_token_vectors)


def choose_auto_class(config: Mapping[str, Any]) -> str:
    """Returns the name of the auto class for a checkpoint's head, from the content of its config.json."""
    for name in config.get("architectures") or []:
        match = re.search(r"For[A-Z]\w+$|LMHeadModel$|Model$", name)
        if match:
            return {"LMHeadModel": "AutoModelForCausalLM", "Model": "AutoModel"}.get(
                match.group(), f"AutoModel{match.group()}"
            )
    return "AutoModelForSequenceClassification"


def load_model_folder(folder: Path, auto_class: str = "") -> PreTrainedModel:
    """Loads the model in `folder`, of a stock or a custom class, in eval mode.

    No code in the folder is executed: its modelling code must be byte-identical to the package's own file, and the
    latter is used.

    Args:
        folder: A folder written by `save_model_folder`.
        auto_class: Name of the auto class for the model's head; inferred from the checkpoint by default, which may have
            a reader of its own (see `distill.checkpoint.readers`).

    Raises:
        InputError: The folder's code differs from the package's, the checkpoint has another head, or the auto class
            is unknown.
        InputError: Weights are missing or have another shape.
    """
    reader = None if auto_class else find_reader(folder)
    if reader is not None:
        encoder: PreTrainedModel = load_model(reader, folder, new_head=True)  # pooling doesn't use the body's pooler
        encoder.eval()
        return encoder
    config = read_config_json(folder, "model")
    auto_class = auto_class or choose_auto_class(config)
    loader: AutoClass | None = getattr(transformers, auto_class, None)
    if loader is None:
        raise InputError(f"{auto_class}: transformers has no such class to load {folder} with")
    if "auto_map" in config:
        _check_code(folder, _find_code(config["auto_map"]))
        loader = cast(AutoClass, _find_custom_class(config["auto_map"], auto_class, folder))
    model: PreTrainedModel = load_model(loader, folder, new_head=auto_class == "AutoModel")
    model.eval()
    return model


def register_custom_classes(folder: Path) -> None:
    """Registers the custom classes of a folder's model with this process's auto classes.

    They are this package's. A body with custom norms can also get the heads of other tasks, as a stock body can. Does
    nothing for a stock checkpoint.

    Raises:
        InputError: The folder's code differs from this package's.
    """
    config = read_config_json(folder, "model")
    if "auto_map" not in config:
        return
    code = _find_code(config["auto_map"])
    _check_code(folder, code)
    for auto_class in config["auto_map"].keys() - {"AutoConfig"}:
        model = _find_custom_class(config["auto_map"], auto_class, folder)
        config_class: Any = model.config_class
        transformers.AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        getattr(transformers, auto_class).register(config_class, model, exist_ok=True)
        if code is modeling_custom_norms:
            _register_heads(config_class)


def _register_heads(config_class: Any) -> None:
    """Registers the classes of a body with custom norms with each of `HEADS` that its stock class has."""
    for head in HEADS:
        auto_class: Any = getattr(transformers, head)
        stock = auto_class._model_mapping.get(config_class.stock, None)
        if isinstance(stock, type):
            model = getattr(modeling_custom_norms, f"{modeling_custom_norms.PREFIX}{stock.__name__}")
            auto_class.register(config_class, model, exist_ok=True)


def _find_code(auto_map: Mapping[str, str]) -> ModuleType:
    """Returns the module that a checkpoint's classes are in; modeling_pruned if none of the shipped ones."""
    stems = {name.partition(".")[0] for name in auto_map.values()}
    return next((SHIPPED[stem] for stem in sorted(stems) if stem in SHIPPED), modeling_pruned)


def _check_code(folder: Path, code: ModuleType = modeling_pruned) -> None:
    """Checks that the folder's modelling code is identical to this package's."""
    source = Path(str(code.__file__))
    path = folder / source.name
    expected = hash_file(source)
    found = hash_file(path) if path.is_file() else "no such file"
    if found != expected:
        raise InputError(
            f"{path}: expected the code that this package ships (SHA-256 {expected[:16]}), found {found[:16]}: it "
            "could do anything, and is not executed"
        )


def _find_custom_class(auto_map: Mapping[str, str], auto_class: str, folder: Path) -> type[PreTrainedModel]:
    """Returns the package's class that `auto_map` specifies for the auto class."""
    code, _, name = auto_map.get(auto_class, "").rpartition(".")
    model_class: type[PreTrainedModel] | None = getattr(SHIPPED.get(code), name, None)
    if model_class is None:
        raise InputError(f"{folder}: expected a model for {auto_class}, found {auto_map}")
    return model_class
