"""The config attributes that hold a model's sizes, by family; this module doesn't import torch."""

LAYER_ATTRIBUTES = ("num_hidden_layers", "n_layers", "n_layer")
HIDDEN = ("hidden_size", "dim", "n_embd")
HEAD_ATTRIBUTES = ("num_attention_heads", "n_heads", "n_head")
# A config stores every keyword that it is given: a GPT-2 with `intermediate_size` still reads `n_inner`.
FFN = ("n_inner", "ffn_dim", "d_ff", "hidden_dim", "intermediate_size")


def find_attribute(config: object, names: tuple[str, ...]) -> str:
    """Returns the first of `names` that the config has; the first of all if it has none."""
    return next((name for name in names if hasattr(config, name)), names[0])
