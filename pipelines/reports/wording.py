"""Task-specific terms of a report: for models, predictions, and scores."""

from collections.abc import Mapping
from dataclasses import dataclass

from pipelines.reports.numbers import Report, Row, counted, ms_text, percent_text, runtime_text


@dataclass(frozen=True)
class Wording:
    """The terms that a report uses for a task.

    Args:
        model: Noun for its model.
        tag: The hub's name of the task.
        rows: Noun for the rows of the test split.
        learnt: Noun for the training data.
        decided: Nouns for the items that are decided on and for the decision; agreement counts these.
        compared: Nouns for the items that have logits, and for the decision given by the largest logit, if any.
        scores: Explanation of each score of the task's scorer.
        labels: Noun for its labels, if it has any.
        validated: Name of the validation score while training, if it differs from the task's own metric.
    """

    model: str
    tag: str
    rows: str
    learnt: str
    decided: tuple[str, str]
    compared: tuple[str, str | None]
    scores: Mapping[str, str]
    labels: str = ""
    validated: str = ""


def language_model_wording(model: str, rows: str, tag: str, tokens: str) -> Wording:
    """Returns the wording of a language model that predicts these tokens."""
    scores = {
        "token accuracy": f"share of the {tokens} that the model finds likeliest",
        "perplexity": f"e to the power of the mean cross-entropy of the {tokens}",
    }
    return Wording(model, tag, rows, rows, (f"{tokens} of the test split", "guess"), ("tokens", "guess"), scores)


WORDING = {
    "text-classification": Wording(
        "text classifier", "text-classification", "texts", "labelled texts",
        ("test texts", "class"), ("texts", "class"),
        {
            "accuracy": "share of the texts that get their class",
            "macro F1": "F1 of each class, the mean over the classes",
        },
        "classes",
    ),
    "multi-label": Wording(
        "classifier of several labels a text", "text-classification", "texts", "labelled texts",
        ("pairs of a test text and a label", "yes or no"), ("texts", None),
        {
            "micro F1": "F1 over all pairs of a text and a label",
            "macro F1": "F1 of each label, the mean over the labels",
            "all right": "share of the texts with all their labels right and no other",
        },
        "labels",
    ),
    "regression": Wording(
        "model that gives a text a number", "text-classification", "texts", "texts with their numbers",
        ("test texts", "number to one decimal"), ("texts", None),
        {
            "Spearman": "correlation of the ranks of the model's numbers with those of the data's",
            "Pearson": "linear correlation of the model's numbers with the data's",
            "RMSE": "root of the mean squared error, in the unit of the data's numbers",
        },
    ),
    "token-classification": Wording(
        "tagger", "token-classification", "sentences", "tagged sentences",
        ("words of the test split", "tag"), ("tokens", "tag"),
        {
            "span F1": "harmonic mean of precision and recall",
            "precision": "share of the spans found that are right, in place and kind",
            "recall": "share of the data's spans that are found",
            "accuracy": "share of the words that get their tag",
        },
        "tags", "F1 of tags",
    ),
    "question-answering": Wording(
        "model that answers questions from a text", "question-answering", "questions", "questions",
        ("test questions", "answer"), ("tokens", None),
        {
            "F1": "how many words the answer shares with the data's, the mean over the questions",
            "exact match": "share of the questions that get the data's answer but for case, articles and punctuation",
        },
        validated="share of starts and ends found",
    ),
    "sentence-embedding": Wording(
        "sentence encoder", "sentence-similarity", "pairs of sentences", "sentences",
        ("test pairs", "cosine to one decimal"), ("texts", None),
        {
            "Spearman": "correlation of the ranks of the pairs' cosines with those of the data's numbers",
            "Pearson": "linear correlation of the pairs' cosines with the data's numbers",
        },
    ),
    "masked-lm": language_model_wording("masked language model", "documents", "fill-mask", "hidden tokens"),
    "causal-lm": language_model_wording("language model", "documents", "text-generation", "tokens"),
    "chat": language_model_wording("chat model", "conversations", "text-generation", "tokens of the answers"),
}  # fmt: skip


def validated_text(report: Report) -> str:
    """Returns the name of the validation score while training, which for tags and answers is a simpler score."""
    words = report["task"] == "token-classification" and report["metric"] == "accuracy"
    return report["metric"] if words else WORDING[report["task"]].validated or report["metric"]


def parity_text(entry: Row, things: str, decision: str | None) -> str:
    """Returns a sentence that compares an export with its source model; see `Wording.compared`."""
    parity = entry["parity"]
    seen = counted(parity["texts"], things)
    if "layers" in parity:
        share = percent_text(parity["same_class"], 2)
        did = f"gave {share} of {seen} the {decision} of the trained model that rounds" if decision else f"read {seen}"
        return (
            f"The {entry['name']} on {runtime_text(entry)} has the numbers that it was trained with: each product "
            f"differs from its layer's, on the same input, by at most {parity['layers']:.1e} of its largest value; "
            f"loaded in a fresh process ({ms_text(parity['load_ms'])} ms, {parity['peak_bytes'] / 1e6:.0f} MB at most) "
            f"it {did}{scores_text(parity)}.{bits_text(parity)}"
        )
    if entry["precision"] == "int8":
        return (
            f"The {entry['name']} on {runtime_text(entry)}, loaded in a fresh process, gave the logits that it gave "
            f"where it was written, on {seen} to within {parity['max_difference']:.1e}; what "
            f"rounding to int8 takes is in its score.{bits_text(parity)}"
        )
    return (
        f"The {entry['name']} on {runtime_text(entry)}, loaded in a fresh process, was compared with the trained model "
        f"on {seen}: the logits differ by {parity['max_difference']:.1e} at most"
        + (f", {percent_text(parity['same_class'])} get the same {decision}." if decision else ".")
    )


def bits_text(parity: Row) -> str:
    if "weight_bits" not in parity:
        return ""
    return (
        f" Its weights use {parity['weight_bits']} bits of 8: products of larger ones would saturate on x86 processors "
        "without VNNI."
    )


def scores_text(parity: Row) -> str:
    if "score" not in parity:
        return ""
    found, trained = (percent_text(parity[name], 2) for name in ("score", "trained_score"))
    return f", and reached an accuracy of {found}, {trained} as trained"
