"""Detection of the prunable axes of a model by following dimensions through its graph."""
