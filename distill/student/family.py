"""Model families: the config attributes of their sizes, and the size that each axis of each weight follows."""

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from distill.errors import InputError
from distill.student.spec import Sizes

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Role of an axis: "hidden"; "q", "k", "v" and "o", heads x head width of queries, keys, values and the input of the
# output projection; "ffn"; None is never sliced; a tuple where one weight concatenates several roles.
Role = str | None | tuple[str, ...]
Roles = tuple[Role, ...]


@dataclass(frozen=True)
class Family:
    """A family's config attributes and weight names.

    Args:
        layers, hidden, heads, ffn: Config attribute that contains each size.
        layer: Pattern of a layer's prefix, with the layer number as its group.
        axes: Pattern of the rest of a weight's name -> roles of its axes; a bias has the first role.
        rotary: Rotary positions rotate the coordinates of a head, so heads can't be narrowed.
        free: The config may set the head width, and heads need not fill the hidden width.
        follow: Further config attributes that equal the hidden width.
        fills: Config attribute of the width that heads fill, if it isn't hidden; the number of heads is then fixed.
        projects: Name of the projection from token embeddings to the hidden width, if the stock class can have one
            before its first norm; low-rank embeddings are then exact except for the rank.
        bare_first: Only the first layer has no norm before its attention, see `without_first_norm`.
    """

    layers: str
    hidden: str
    heads: str
    ffn: str
    layer: str
    axes: tuple[tuple[str, Roles], ...]
    rotary: bool = False
    free: bool = False
    follow: tuple[str, ...] = ()
    fills: str = ""
    projects: str = ""
    bare_first: bool = False

    def sizes(self, config: "PretrainedConfig") -> Sizes:
        layers = tuple(range(getattr(config, self.layers)))
        hidden, heads, ffn = (getattr(config, name) for name in (self.hidden, self.heads, self.ffn))
        own = getattr(config, self.fills) // heads if self.fills else getattr(config, "head_dim", None)
        kv = getattr(config, "num_key_value_heads", heads)
        return Sizes(
            layers,
            hidden,
            heads,
            ffn or 4 * hidden,  # GPT-2 leaves n_inner unset for this width
            kv=kv if kv != heads else 0,
            head=own or (hidden // heads if self.rotary else 0),
            free=self.free or bool(self.fills),
        )

    def config_changes(self, config: "PretrainedConfig", sizes: Sizes) -> dict[str, Any]:
        """Returns the attributes of the student's config that depend on its sizes."""
        changes: dict[str, Any] = {self.layers: len(sizes.layers)}
        changes |= {self.hidden: sizes.hidden, self.heads: sizes.heads, self.ffn: sizes.ffn}
        changes |= {name: sizes.hidden for name in self.follow if hasattr(config, name)}
        if hasattr(config, "num_key_value_heads"):
            changes["num_key_value_heads"] = sizes.kv or sizes.heads
        if self.free:
            changes["head_dim"] = sizes.head_width
        kinds = getattr(config, "layer_types", None)
        if kinds:
            changes["layer_types"] = [kinds[i % len(kinds)] for i in sizes.layers]
        return changes

    def roles(self, name: str, dimensions: int) -> Roles:
        """Returns the roles of the axes of the weight `name`."""
        for pattern, roles in self.axes:
            if re.search(pattern, name):
                return roles[:dimensions]
        raise InputError(f"weight {name!r}: not known in this family: its width can't be changed")


HEADS: tuple[tuple[str, Roles], ...] = (
    (r"(pooler|classifier|head)\.dense\.", ("hidden", "hidden")),
    (r"(?:^|\.)(classifier|score)\.(out_proj\.)?weight", (None, "hidden")),
    (r"(?:^|\.)(classifier|score)\.(out_proj\.)?bias", (None,)),
    (r"^generator_predictions\.(dense\.bias|LayerNorm\.)", (None,)),  # have the embedding width, see AS_WIDE
    (r"^generator_predictions\.dense\.weight", (None, "hidden")),
    (r"(transform|lm_head)\.dense\.|^vocab_transform\.", ("hidden", "hidden")),
    (r"^generator_lm_head\.", (None, None)),
    (r"(transform|lm_head)\.(LayerNorm|layer_norm)\.|^vocab_layer_norm\.", ("hidden",)),
    (r"(decoder|^vocab_projector|^lm_head)\.weight", (None, "hidden")),
    (r"((predictions|lm_head|decoder|vocab_projector)\.)bias", (None,)),
    (r"^qa_outputs\.weight", (None, "hidden")),
    (r"^qa_outputs\.bias", (None,)),
    (r"^projections\.0\.weight", (None, "hidden")),
    (r"^projections\.", (None, None)),
)

BERT = Family(
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    r"(?:^|\.)encoder\.layer\.(\d+)\.",
    (
        (r"attention\.self\.(pos_)?query(_proj)?\.", ("q", "hidden")),
        (r"attention\.self\.(pos_)?key(_proj)?\.", ("k", "hidden")),
        (r"attention\.self\.value(_proj)?\.", ("v", "hidden")),
        (r"attention\.output\.dense\.weight", ("hidden", "o")),
        (r"attention\.output\.dense\.bias", ("hidden",)),
        (r"intermediate\.dense\.", ("ffn", "hidden")),
        (r"layer\.\d+\.output\.dense\.weight", ("hidden", "ffn")),
        (r"layer\.\d+\.output\.dense\.bias", ("hidden",)),
        (r"(encoder|embeddings|attention\.output|\d\.output|conv)\.LayerNorm\.", ("hidden",)),
        (r"embeddings\.\w+_embeddings\.weight|rel_embeddings\.weight", (None, "hidden")),
        (r"embeddings_project\.|embed_proj\.", ("hidden", None)),
        (r"encoder\.conv\.conv\.", ("hidden", "hidden", None)),
        *HEADS,
    ),
)
DEBERTA = replace(BERT, follow=("pooler_hidden_size",), projects="deberta.embeddings.embed_proj.weight")

DISTILBERT = Family(
    "n_layers",
    "dim",
    "n_heads",
    "hidden_dim",
    r"(?:^|\.)transformer\.layer\.(\d+)\.",
    (
        (r"attention\.q_lin\.", ("q", "hidden")),
        (r"attention\.k_lin\.", ("k", "hidden")),
        (r"attention\.v_lin\.", ("v", "hidden")),
        (r"attention\.out_lin\.weight", ("hidden", "o")),
        (r"attention\.out_lin\.bias", ("hidden",)),
        (r"ffn\.lin1\.", ("ffn", "hidden")),
        (r"ffn\.lin2\.weight", ("hidden", "ffn")),
        (r"ffn\.lin2\.bias", ("hidden",)),
        (r"(embeddings\.LayerNorm|layer\.\d+\.\w*layer_norm)\.", ("hidden",)),
        (r"embeddings\.\w+_embeddings\.weight", (None, "hidden")),
        (r"pre_classifier\.", ("hidden", "hidden")),
        *HEADS,
    ),
)

MODERNBERT = Family(
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    r"(?:^|\.)layers\.(\d+)\.",
    (
        (r"attn\.Wqkv\.", (("q", "k", "v"), "hidden")),
        (r"attn\.Wo\.weight", ("hidden", "o")),
        (r"mlp\.Wi\.", (("ffn", "ffn"), "hidden")),
        (r"mlp\.Wo\.weight", ("hidden", "ffn")),
        (r"(attn|mlp)\.Wo\.bias", ("hidden",)),
        (r"norm\.", ("hidden",)),
        (r"tok_embeddings\.weight", (None, "hidden")),
        *HEADS,
    ),
    rotary=True,
    bare_first=True,
)

LLAMA = Family(
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    r"(?:^|\.)layers\.(\d+)\.",
    (
        (r"self_attn\.q_proj\.", ("q", "hidden")),
        (r"self_attn\.k_proj\.", ("k", "hidden")),
        (r"self_attn\.v_proj\.", ("v", "hidden")),
        (r"self_attn\.o_proj\.weight", ("hidden", "o")),
        (r"self_attn\.o_proj\.bias", ("hidden",)),
        (r"self_attn\.[qk]_norm\.", (None,)),  # one head wide
        (r"mlp\.(gate|up)_proj\.", ("ffn", "hidden")),
        (r"mlp\.down_proj\.weight", ("hidden", "ffn")),
        (r"mlp\.down_proj\.bias", ("hidden",)),
        (r"norm\.", ("hidden",)),
        (r"embed_tokens\.weight", (None, "hidden")),
        *HEADS,
    ),
    rotary=True,
    free=True,
)

# ELECTRA's language-modelling head if its embeddings are as wide as the layers.
AS_WIDE: tuple[tuple[str, Roles], ...] = (
    (r"^generator_predictions\.(dense|LayerNorm)\.", ("hidden", "hidden")),
    (r"^generator_lm_head\.weight", (None, "hidden")),
)

# GPT-2 stores its linear weights as [in, out].
GPT2 = Family(
    "n_layer",
    "n_embd",
    "n_head",
    "n_inner",
    r"(?:^|\.)h\.(\d+)\.",
    (
        (r"attn\.c_attn\.weight", ("hidden", ("q", "k", "v"))),
        (r"attn\.c_attn\.bias", (("q", "k", "v"),)),
        (r"attn\.c_proj\.weight", ("o", "hidden")),
        (r"mlp\.c_fc\.weight", ("hidden", "ffn")),
        (r"mlp\.c_fc\.bias", ("ffn",)),
        (r"mlp\.c_proj\.weight", ("ffn", "hidden")),
        (r"(attn|mlp)\.c_proj\.bias", ("hidden",)),
        (r"\.ln_\w+\.", ("hidden",)),
        (r"wte\.weight|wpe\.weight", (None, "hidden")),
        *HEADS,
    ),
)

# Heads fill the width inside a block, so their number is fixed.
MOBILEBERT = Family(
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    r"(?:^|\.)encoder\.layer\.(\d+)\.",
    (
        (r"attention\.self\.(query|key|value)\.bias|attention\.self\.(query|key)\.weight", (None, None)),
        (r"attention\.output\.", (None, None)),
        (r"intermediate\.dense\.", ("ffn", None)),
        (r"(layer\.\d+|ffn\.\d+)\.output\.dense\.weight", (None, "ffn")),
        (r"(layer\.\d+|ffn\.\d+)\.output\.(dense\.bias|LayerNorm\.)", (None,)),
        (r"output\.bottleneck\.dense\.|embedding_transformation\.", ("hidden", None)),
        (r"output\.bottleneck\.LayerNorm\.|embeddings\.LayerNorm\.", ("hidden",)),
        (r"bottleneck\.(input|attention)\.dense\.weight", (None, "hidden")),
        (r"bottleneck\.(input|attention)\.", (None,)),
        (r"word_embeddings\.weight", (None, None)),
        (r"embeddings\.\w+_embeddings\.weight", (None, "hidden")),
        *HEADS,
    ),
    fills="intra_bottleneck_size",
)

FAMILIES = {
    "bert": BERT,
    "roberta": BERT,
    "xlm-roberta": BERT,
    "electra": BERT,
    "distilbert": DISTILBERT,
    "deberta-v2": DEBERTA,
    "modernbert": MODERNBERT,
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "gemma": LLAMA,
    "gemma2": LLAMA,
    "gemma3_text": LLAMA,
    "gpt2": GPT2,
    "mobilebert": MOBILEBERT,
}
ENCODERS = (
    "bert", "roberta", "xlm-roberta", "electra", "distilbert", "deberta-v2", "modernbert", "mobilebert",
)  # fmt: skip


def family_of(config: "PretrainedConfig") -> Family:
    """Returns the family of a checkpoint.

    Raises:
        InputError: The model type is not supported.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise InputError(
            f"student: can't be built from a teacher of type {config.model_type!r}; known are {', '.join(FAMILIES)}. "
            "Name a checkpoint with --student instead"
        )
    if config.model_type == "mobilebert":
        wide = None if config.use_bottleneck_attention else "hidden"
        return replace(family, axes=((r"attention\.self\.value\.weight", (None, wide)), *family.axes))
    if getattr(config, "embedding_size", config.hidden_size) != config.hidden_size:  # a projection lies between
        return replace(family, axes=((r"(?:^|\.)embeddings\.", (None, None)), *family.axes))
    return replace(family, axes=(*AS_WIDE, *family.axes)) if config.model_type == "electra" else family
