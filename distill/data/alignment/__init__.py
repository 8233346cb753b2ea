"""Texts encoded by two tokenizers: alignment of their tokens, and rows with both encodings."""
