"""Which shape to cut for a budget: costs, allocation, candidates."""
