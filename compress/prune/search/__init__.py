"""Search for the shape that meets a budget: cost model, allocation and candidates."""
