"""Texts larger than memory: tokenized once, in parallel processes, and stored as memory-mapped token ids."""
