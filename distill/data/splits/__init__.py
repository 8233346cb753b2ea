"""Train, validation and test splits: labels, held-out rows, overlap, and findings for the report."""
