"""Access to transformers models: inputs, attention vectors, output heads, generation, sentence vectors."""
