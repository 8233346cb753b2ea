"""Text in: sources, columns, splits, token ids and batches."""
