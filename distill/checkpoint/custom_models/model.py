"""Facts about a loaded model that may be of a custom class."""

import copy

from transformers import PreTrainedConfig, PreTrainedModel

from distill.checkpoint.custom_models import modeling_pruned, modeling_token_vectors


def is_pruned(model: PreTrainedModel) -> bool:
    """Returns whether the model is of the class shipped with the weights rather than a stock class."""
    return getattr(model.config, "pruned", None) is not None


def has_custom_norms(model: PreTrainedModel) -> bool:
    """Returns whether norms of the model are of another kind than in its stock class."""
    return getattr(model.config, "norms", None) is not None


def has_token_vectors(model: PreTrainedModel) -> bool:
    """Returns whether the model combines vectors of tokens without attention."""
    return isinstance(model, modeling_token_vectors.TokenVectorsPreTrainedModel)


def stock_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """Returns the class of transformers that the model is of or derives from."""
    return type(model).stock if is_pruned(model) or has_custom_norms(model) else type(model)  # type: ignore[attr-defined]


def embedding_rank(model: PreTrainedModel) -> int:
    """Returns the rank of the model's token embedding if it is factorized, otherwise 0."""
    return model.config.pruned.get("embedding_rank", 0) if is_pruned(model) else 0


def head_width(config: PreTrainedConfig) -> int:
    """Returns the width of a head, for models in which all heads have the same width."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def dense_stock_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns the stock config of the model before any pruning, except for the vocabulary, which is the current one."""
    return copy.deepcopy(config) if getattr(config, "pruned", None) is None else modeling_pruned.dense_config(config)
