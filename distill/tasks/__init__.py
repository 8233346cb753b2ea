"""The tasks: for each one the meaning of a model's outputs, the scores, and the stock class of the model."""
