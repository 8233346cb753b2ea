"""Construction of smaller models from the kept weights, and their checkpoints."""
