"""The model type of the stock class that a shipped class derives from."""

CUSTOM_NORMS = "custom_norms_"  # what modeling_custom_norms.py puts before the stock type
PRUNED = "pruned_"  # and modeling_pruned.py


def stock_type(model_type: str) -> str:
    """Returns the model type of the stock class of a pruned model or one with custom norms; others unchanged."""
    return model_type.removeprefix(PRUNED).removeprefix(CUSTOM_NORMS)
