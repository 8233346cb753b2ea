"""What a training takes in memory, and how it fits into a budget."""
