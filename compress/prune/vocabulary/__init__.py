"""Vocabulary pruning: selection of the tokens to keep, and the reduced tokenizer and model."""
