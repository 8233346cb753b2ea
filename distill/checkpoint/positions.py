"""Maximum sequence length of a model."""

from transformers import PretrainedConfig

from distill.checkpoint.stock_type import stock_type

# Families whose first token has the position after the padding id.
SHIFTED = ("roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "camembert", "data2vec-text", "esm",
           "ibert", "longformer", "luke", "mpnet", "xmod")  # fmt: skip


def find_max_tokens(config: PretrainedConfig) -> int | None:
    """Returns the maximum number of tokens per row.

    None if the config doesn't set it, or if positions are relative or scaled.
    """
    positions = getattr(config, "max_position_embeddings", None)
    rotary = getattr(config, "rope_parameters", None) or {}
    # Some families have settings for each type of layer.
    rotary_settings = [each for each in rotary.values() if isinstance(each, dict)] or [rotary]
    relative = getattr(config, "alibi", False) or not getattr(config, "position_biased_input", True)
    kind = getattr(config, "position_embedding_type", None) or "absolute"
    if not isinstance(positions, int) or positions < 1 or relative or kind != "absolute":
        return None
    if any(each.get("rope_type", "default") != "default" for each in rotary_settings):
        return None
    return positions - (config.pad_token_id or 0) - 1 if stock_type(config.model_type) in SHIFTED else positions
