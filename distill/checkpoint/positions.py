"""How many tokens a model has positions for."""

from transformers import PretrainedConfig

# Their first token has the position after that of the padding.
SHIFTED = ("roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "camembert", "data2vec-text", "esm",
           "ibert", "longformer", "luke", "mpnet", "xmod")  # fmt: skip


def positions_of(config: PretrainedConfig) -> int | None:
    """Most tokens of a row; None where the config doesn't tell, or where positions are relative or stretched."""
    most = getattr(config, "max_position_embeddings", None)
    rotary = getattr(config, "rope_parameters", None)
    relative = getattr(config, "alibi", False) or not getattr(config, "position_biased_input", True)
    kind = getattr(config, "position_embedding_type", None) or "absolute"
    if not isinstance(most, int) or most < 1 or relative or kind != "absolute":
        return None
    if rotary and rotary.get("rope_type") != "default":
        return None
    return most - (config.pad_token_id or 0) - 1 if config.model_type in SHIFTED else most
