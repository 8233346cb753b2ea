"""Data loading: sources, columns, splits, token ids and batches."""
