"""Sizes of a model, read from its config, for the layer terms."""

from transformers import PretrainedConfig

from distill.checkpoint.sentence_form import vector_width
from distill.losses.config import LayerSizes
from distill.models.attention import read_attention_widths


def read_layer_sizes(config: PretrainedConfig) -> LayerSizes:
    """Returns the sizes that `match_layers` and `LayerTerms` compare."""
    width, vector, attention = config.hidden_size, vector_width(config), read_attention_widths(config)
    return LayerSizes(
        config.num_hidden_layers,
        width,
        config.num_attention_heads,
        vector if vector != width else 0,
        attention if {*attention} != {width} else (),
    )
