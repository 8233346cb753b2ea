"""Data sets by kind of row: tagged words, questions, sentences, conversations, documents."""
