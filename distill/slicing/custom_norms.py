"""A model with norms of other kinds than its stock class, built from given weights."""

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from distill.checkpoint.custom_models import has_custom_norms, modeling_custom_norms, stock_class
from distill.checkpoint.norm_kinds import MOBILEBERT
from distill.slicing.build import build_filled
from distill.slicing.config import empty_model


def build_with_norms(like: PreTrainedModel, norms: Mapping[str, str], weights: Mapping[str, Tensor]) -> PreTrainedModel:
    """Returns a model with norms of other kinds.

    Args:
        like: The model to replace the norms of; it isn't modified.
        norms: Name of each norm, as a module of the base model -> its kind in `modeling_custom_norms.NORM_CLASSES`.
        weights: By their names in the new model; those of norms that it lacks are left out.
    """
    kind, config = stock_class(like), make_stock_config(like)
    kinds = set(norms.values())
    settings = {name: setting for setting, name in MOBILEBERT.items()}
    if config.model_type == "mobilebert" and len(kinds) == 1 and kinds <= settings.keys():
        config.normalization_type = settings[kinds.pop()]
    else:
        config = make_norms_config(kind, config, norms)
        kind = getattr(modeling_custom_norms, f"{modeling_custom_norms.PREFIX}{kind.__name__}")
    names = empty_model(kind, config).state_dict().keys()
    return build_filled(kind, config, {name: weights[name] for name in names}, like)


def make_stock_config(model: PreTrainedModel) -> PreTrainedConfig:
    """Returns a copy of the config of the model's stock class."""
    if not has_custom_norms(model):
        return copy.deepcopy(model.config)
    settings = copy.deepcopy(model.config.to_dict())
    for name in ("norms", "auto_map", "model_type", "architectures"):
        settings.pop(name, None)
    kind: Any = type(model.config)
    config: PreTrainedConfig = kind.stock.from_dict(settings)
    return config


def make_norms_config(
    stock: type[PreTrainedModel], config: PreTrainedConfig, norms: Mapping[str, str]
) -> PreTrainedConfig:
    """Returns the config of the shipped class, which lists the norms that differ from the stock class."""
    kind = getattr(modeling_custom_norms, f"{modeling_custom_norms.PREFIX}{type(config).__name__}")
    code = modeling_custom_norms.__name__.rpartition(".")[2]
    classes = {
        "AutoConfig": kind.__name__,
        modeling_custom_norms.auto_class(stock): f"{modeling_custom_norms.PREFIX}{stock.__name__}",
    }
    settings = copy.deepcopy(config.to_dict())
    settings.pop("model_type")
    auto_map = {name: f"{code}.{each}" for name, each in classes.items()}
    norms_config: PreTrainedConfig = kind.from_dict(settings | {"norms": dict(norms), "auto_map": auto_map})
    return norms_config
