"""Training objectives: pure functions on tensors, and their weighted sum."""
