"""What tracing can't find out about a model family, or what must be known before torch and the config's class load.

Which coordinates of which weight belong together is found by `distill.slicing`. A config alone determines the sizes of
a student, so what restricts these is listed here by model type; `config.json` may leave out the attributes from which
it could be seen, such as the angles of rotary positions. Families that aren't listed are described by their config's
class, and their heads keep their width.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from distill.slicing.attributes import FFN, HEAD_ATTRIBUTES, HIDDEN, LAYER_ATTRIBUTES, find_attribute
from distill.student.sizes import Sizes

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Family:
    """Properties of a model family.

    Args:
        has_rotary_positions: Heads can't be narrowed, because rotary positions turn their coordinates in pairs. The
            graph contains only the arithmetic of the rotation.
        config_sets_head_width: The config may set the head width, and heads need not fill the hidden width: the
            possible sizes depend on it, before any model exists.
        attention_width_attribute: Config attribute of the width that heads fill, if it isn't hidden; the number of
            heads is then fixed. No weight tells the number of heads.
        embedding_projection: Name of the projection from token embeddings to the hidden width, if the stock class can
            have one before its first norm; low-rank embeddings are then exact except for the rank. A teacher without
            the projection has no such weight.
        first_layer_lacks_attention_norm: Only the first layer has no norm before its attention, see
            `fold_first_attention_norm`: tracing a model doesn't show how its class would treat another first layer.
    """

    has_rotary_positions: bool = False
    config_sets_head_width: bool = False
    attention_width_attribute: str = ""
    embedding_projection: str = ""
    first_layer_lacks_attention_norm: bool = False

    def sizes(self, config: "PretrainedConfig") -> Sizes:
        """Returns the sizes in a config.

        Raises:
            AttributeError: The config has no attribute for one of the sizes.
        """
        count, hidden, heads, ffn = (
            getattr(config, find_attribute(config, names)) for names in (LAYER_ATTRIBUTES, HIDDEN, HEAD_ATTRIBUTES, FFN)
        )
        head_dim = getattr(config, "head_dim", None)
        if self.attention_width_attribute:
            head_dim = getattr(config, self.attention_width_attribute) // heads
        kv = getattr(config, "num_key_value_heads", None) or heads
        return Sizes(
            tuple(range(count)),
            hidden,
            heads,
            ffn or 4 * hidden,  # GPT-2 leaves n_inner unset for this width
            kv=kv if kv != heads else 0,
            head=head_dim or (hidden // heads if self.has_rotary_positions else 0),
            free=self.config_sets_head_width or bool(self.attention_width_attribute),
        )


ABSOLUTE = Family()
LLAMA = Family(has_rotary_positions=True, config_sets_head_width=True)
FAMILIES = {
    "bert": ABSOLUTE,
    "roberta": ABSOLUTE,
    "xlm-roberta": ABSOLUTE,
    "electra": ABSOLUTE,
    "distilbert": ABSOLUTE,
    "deberta-v2": Family(embedding_projection="deberta.embeddings.embed_proj.weight"),
    "modernbert": Family(has_rotary_positions=True, first_layer_lacks_attention_norm=True),
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "gemma": LLAMA,
    "gemma2": LLAMA,
    "gemma3_text": LLAMA,
    "gpt2": ABSOLUTE,
    "mobilebert": Family(attention_width_attribute="intra_bottleneck_size"),
}
ENCODERS = (
    "bert", "roberta", "xlm-roberta", "electra", "distilbert", "deberta-v2", "modernbert", "mobilebert",
)  # fmt: skip


def find_family(config: "PretrainedConfig") -> Family:
    """Returns the family of a checkpoint; for one that isn't listed, what its config shows."""
    listed = FAMILIES.get(config.model_type)
    free = any(getattr(config, name, None) for name in ("num_key_value_heads", "head_dim"))
    return listed or Family(has_rotary_positions=True, config_sets_head_width=free)
