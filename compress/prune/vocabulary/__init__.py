"""Pruning the vocabulary: which tokens stay, and the tokenizer that has only those."""
