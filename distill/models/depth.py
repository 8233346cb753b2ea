"""Configs of models with another number of layers."""

import copy

from transformers import PretrainedConfig


def set_depth(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    """Returns a copy of a config with this number of layers, the first ones where they differ."""
    changed = copy.deepcopy(config)
    text = changed.get_text_config()
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    text.num_hidden_layers = layers
    text.use_cache = False
    return changed
