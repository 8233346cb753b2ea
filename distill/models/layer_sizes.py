"""Sizes of a model, read from its config, for the layer terms."""

from typing import Any

from distill.checkpoint.sentence_folder import vector_width
from distill.losses.config import LayerSizes
from distill.models.attention import attention_widths


def sizes_of(config: Any) -> LayerSizes:
    width, vector, attended = config.hidden_size, vector_width(config), attention_widths(config)
    return LayerSizes(
        config.num_hidden_layers,
        width,
        config.num_attention_heads,
        vector if vector != width else 0,
        attended if {*attended} != {width} else (),
    )
