"""Where each family of encoders keeps its sizes, and which size each axis of each weight follows."""

import re
from dataclasses import dataclass, replace

from transformers import PretrainedConfig

from distill.errors import InputError
from distill.student.spec import Sizes

# Roles of an axis: "hidden"; "qk" and "vo", heads x head width as queries and keys or as values and outputs see it;
# "ffn"; None is kept whole.
Roles = tuple[str | None, ...]


@dataclass(frozen=True)
class Family:
    """A family's config names and weight names.

    Args:
        layers, hidden, heads, ffn: Attribute of the config that holds each size.
        layer: Pattern of a layer's prefix, with the number as its group.
        axes: Pattern of the rest of a weight's name -> roles of its axes; a bias takes the first.
    """

    layers: str
    hidden: str
    heads: str
    ffn: str
    layer: str
    axes: tuple[tuple[str, Roles], ...]

    def sizes(self, config: PretrainedConfig) -> Sizes:
        layers = tuple(range(getattr(config, self.layers)))
        return Sizes(layers, *(getattr(config, name) for name in (self.hidden, self.heads, self.ffn)))

    def config_changes(self, sizes: Sizes) -> dict[str, int]:
        return {
            self.layers: len(sizes.layers),
            self.hidden: sizes.hidden,
            self.heads: sizes.heads,
            self.ffn: sizes.ffn,
        }

    def roles(self, name: str, dimensions: int) -> Roles:
        """Roles of the axes of the weight called `name`."""
        for pattern, roles in self.axes:
            if re.search(pattern, name):
                return roles[:dimensions]
        raise InputError(f"weight {name!r}: not known in this family: its width can't be changed")


BERT = Family(
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    r"(?:^|\.)encoder\.layer\.(\d+)\.",
    (
        (r"attention\.self\.(query|key)\.", ("qk", "hidden")),
        (r"attention\.self\.value\.", ("vo", "hidden")),
        (r"attention\.output\.dense\.weight", ("hidden", "vo")),
        (r"attention\.output\.dense\.bias", ("hidden",)),
        (r"intermediate\.dense\.", ("ffn", "hidden")),
        (r"layer\.\d+\.output\.dense\.weight", ("hidden", "ffn")),
        (r"layer\.\d+\.output\.dense\.bias", ("hidden",)),
        (r"LayerNorm\.", ("hidden",)),
        (r"embeddings\.\w+_embeddings\.weight", (None, "hidden")),
        (r"embeddings_project\.", ("hidden", None)),
        (r"(pooler|classifier)\.dense\.", ("hidden", "hidden")),
        (r"classifier\.(out_proj\.)?weight", (None, "hidden")),
        (r"classifier\.(out_proj\.)?bias", (None,)),
    ),
)

DISTILBERT = Family(
    "n_layers",
    "dim",
    "n_heads",
    "hidden_dim",
    r"(?:^|\.)transformer\.layer\.(\d+)\.",
    (
        (r"attention\.[qk]_lin\.", ("qk", "hidden")),
        (r"attention\.v_lin\.", ("vo", "hidden")),
        (r"attention\.out_lin\.weight", ("hidden", "vo")),
        (r"attention\.out_lin\.bias", ("hidden",)),
        (r"ffn\.lin1\.", ("ffn", "hidden")),
        (r"ffn\.lin2\.weight", ("hidden", "ffn")),
        (r"ffn\.lin2\.bias", ("hidden",)),
        (r"(LayerNorm|layer_norm)\.", ("hidden",)),
        (r"embeddings\.\w+_embeddings\.weight", (None, "hidden")),
        (r"pre_classifier\.", ("hidden", "hidden")),
        (r"classifier\.weight", (None, "hidden")),
        (r"classifier\.bias", (None,)),
    ),
)

FAMILIES = {"bert": BERT, "roberta": BERT, "xlm-roberta": BERT, "electra": BERT, "distilbert": DISTILBERT}


def family_of(config: PretrainedConfig) -> Family:
    """The family of a checkpoint.

    Raises:
        InputError: A family whose structure isn't known here.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise InputError(
            f"student: can't be built from a teacher of type {config.model_type!r}; known are {', '.join(FAMILIES)}. "
            "Name a checkpoint with --student instead"
        )
    if getattr(config, "embedding_size", config.hidden_size) != config.hidden_size:  # a projection stands between
        return replace(family, axes=((r"(?:^|\.)embeddings\.", (None, None)), *family.axes))
    return family
