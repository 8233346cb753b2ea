"""Rows of each kind: tagged words, questions, sentences, conversations, documents."""
