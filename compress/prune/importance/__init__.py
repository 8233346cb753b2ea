"""Scores of a model's units and layers, and the gates that scores and learned masks act through."""
