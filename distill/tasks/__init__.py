"""One file a task: what a model's output means, how it is scored, which stock class holds it."""
