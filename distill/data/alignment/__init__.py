"""The same text under two tokenizers: which of their tokens cover the same characters, and rows encoded by both."""
