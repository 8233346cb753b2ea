"""The prunable axes of a model, found by following dimensions through its graph."""
