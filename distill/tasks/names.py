"""Names of tasks, for what is told before any of them is loaded."""

WRITING = ("causal-lm", "chat")  # those whose models can go on with a text
LANGUAGE = ("masked-lm", *WRITING)  # those that answer with words
