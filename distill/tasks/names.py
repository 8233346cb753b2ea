"""Names of the tasks and of their stock heads, available without importing the tasks themselves."""

from collections.abc import Mapping

GENERATIVE_TASKS = ("causal-lm", "chat")  # tasks whose models can generate text
LANGUAGE_TASKS = ("masked-lm", *GENERATIVE_TASKS)  # tasks whose models predict tokens
LANGUAGE_HEADS: Mapping[str, tuple[str, ...]] = {
    "masked-lm": ("ForMaskedLM", "ForPreTraining"),
    "causal-lm": ("ForCausalLM", "LMHeadModel"),
    "chat": ("ForCausalLM", "LMHeadModel"),
}
_TEXT_TASKS = ("text-classification", "multi-label", "regression", "sentence-embedding")
# Kind of student without attention -> the tasks that it can do.
ATTENTION_FREE_TASKS: Mapping[str, tuple[str, ...]] = {
    "static": _TEXT_TASKS,
    "cnn": (*_TEXT_TASKS, "token-classification"),
    "gru": (*_TEXT_TASKS, "token-classification"),
}


def default_signal(task: str) -> str:
    """Returns the signal that a cache stores by default for the task."""
    return "sampled" if task in LANGUAGE_TASKS else "embedding" if task == "sentence-embedding" else "logits"
