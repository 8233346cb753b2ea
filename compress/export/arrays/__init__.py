"""Export of students without attention to arrays, with a reader that needs numpy and tokenizers only."""
