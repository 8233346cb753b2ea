"""The model type of the stock class that a shipped class derives from."""

RENORMED = "renormed_"  # what modeling_renormed.py puts before the stock type


def stock_type(model_type: str) -> str:
    """Returns the model type of a renormed model's stock class; others unchanged."""
    return model_type.removeprefix(RENORMED)
