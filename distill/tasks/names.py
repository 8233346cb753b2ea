"""What is known of tasks before any of them is loaded: their names, and the heads of stock classes for them."""

from collections.abc import Iterable, Mapping

WRITING = ("causal-lm", "chat")  # those whose models can go on with a text
LANGUAGE = ("masked-lm", *WRITING)  # those that answer with words
HEADS: Mapping[str, str] = {  # ends of class names -> task; a body's own and those for words come before any training
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "PooledModel": "sentence-embedding",
}
CLASSES = "ForSequenceClassification"  # for one class a text, several or a number
WORDS: Mapping[str, tuple[str, ...]] = {
    "masked-lm": ("ForMaskedLM", "ForPreTraining"),
    "causal-lm": ("ForCausalLM", "LMHeadModel"),
    "chat": ("ForCausalLM", "LMHeadModel"),
}
PROBLEMS: Mapping[str, str] = {
    "single_label_classification": "text-classification",
    "multi_label_classification": "multi-label",
    "regression": "regression",
}


def kept_of_task(task: str) -> str:
    """What a cache keeps of the teacher's answer, where nothing else is asked for."""
    return "sampled" if task in LANGUAGE else "embedding" if task == "sentence-embedding" else "logits"


def task_of_head(architectures: Iterable[str], problem: str | None, labels: int | None) -> str:
    """The task that a checkpoint was trained for; empty for a pre-trained body, and where that isn't sure.

    Args:
        architectures, problem: As its config says.
        labels: That its head has, where the config says it.
    """
    for name in architectures:
        if name.endswith(CLASSES):
            if problem is None and labels is None:
                return ""
            return PROBLEMS.get(problem or ("regression" if labels == 1 else "single_label_classification"), "")
        task = next((task for end, task in HEADS.items() if name.endswith(end)), None)
        if task is not None:
            return task
    return ""
