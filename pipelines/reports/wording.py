"""Task-specific terms of a report: for models, predictions, and scores."""

from collections.abc import Mapping
from dataclasses import dataclass

from pipelines.reports.formatting import capitalize_first, format_ms, format_percent, format_quantity, format_runtime
from pipelines.reports.schema import ModelEntry, ParityEntry, Report


@dataclass(frozen=True)
class Comparison:
    """What two models are compared on.

    Args:
        items: Plural noun for the items of which each gets a decision.
        decision: Noun for the decision; empty if there is none, and the outputs are numbers.
    """

    items: str
    decision: str = ""


@dataclass(frozen=True)
class Wording:
    """The terms that a report uses for a task.

    Args:
        model: Noun for its model.
        tag: The hub's name of the task.
        rows: Plural noun for the rows of the test split.
        training_rows: Plural noun for the rows of the training split.
        agreement: What student and teacher are compared on.
        parity: What an exported file and its source are compared on; the decision is that of the largest logit.
        scores: Explanation of each score of the task's scorer.
        labels: Plural noun for its labels, if it has any.
        validation_metric: Name of the validation score while training, if it differs from the task's own metric.
    """

    model: str
    tag: str
    rows: str
    training_rows: str
    agreement: Comparison
    parity: Comparison
    scores: Mapping[str, str]
    labels: str = ""
    validation_metric: str = ""


def language_model_wording(model: str, rows: str, tag: str, tokens: str) -> Wording:
    """Returns the wording of a language model that predicts these tokens."""
    return Wording(
        model,
        tag,
        rows,
        rows,
        Comparison(f"{tokens} of the test split", "prediction"),
        Comparison("tokens", "prediction"),
        {
            "token accuracy": f"share of the {tokens} to which the model gives the highest probability",
            "perplexity": f"exponential of the mean cross-entropy of the {tokens}",
        },
    )


WORDING = {
    "text-classification": Wording(
        "text classifier", "text-classification", "texts", "labelled texts",
        Comparison("test texts", "class"), Comparison("texts", "class"),
        {
            "accuracy": "share of the texts with the correct class",
            "macro F1": "mean of the classes' F1 scores",
        },
        "classes",
    ),
    "multi-label": Wording(
        "multi-label text classifier", "text-classification", "texts", "labelled texts",
        Comparison("pairs of a test text and a label", "decision"), Comparison("texts"),
        {
            "micro F1": "F1 over all pairs of a text and a label",
            "macro F1": "mean of the labels' F1 scores",
            "exact match": "share of the texts with exactly the correct labels",
        },
        "labels",
    ),
    "regression": Wording(
        "text regression model", "text-classification", "texts", "texts with numbers",
        Comparison("test texts", "number, rounded to one decimal"), Comparison("texts"),
        {
            "Spearman": "rank correlation of the predicted and the true numbers",
            "Pearson": "linear correlation of the predicted and the true numbers",
            "RMSE": "root mean squared error, in the unit of the data's numbers",
        },
    ),
    "token-classification": Wording(
        "tagger", "token-classification", "sentences", "tagged sentences",
        Comparison("words of the test split", "tag"), Comparison("tokens", "tag"),
        {
            "span F1": "harmonic mean of precision and recall",
            "precision": "share of the predicted spans with the correct position and type",
            "recall": "share of the true spans that are found",
            "accuracy": "share of the words with the correct tag",
        },
        "tags",
    ),
    "question-answering": Wording(
        "question-answering model", "question-answering", "questions", "questions",
        Comparison("test questions", "answer"), Comparison("tokens"),
        {
            "F1": "word overlap of the predicted and the true answer, the mean over the questions",
            "exact match": "share of the questions with the true answer, ignoring case, articles and punctuation",
        },
        validation_metric="start and end accuracy",
    ),
    "sentence-embedding": Wording(
        "sentence encoder", "sentence-similarity", "pairs of sentences", "sentences",
        Comparison("test pairs", "cosine similarity, rounded to one decimal"), Comparison("texts"),
        {
            "Spearman": "rank correlation of the pairs' cosine similarities and the data's scores",
            "Pearson": "linear correlation of the pairs' cosine similarities and the data's scores",
        },
    ),
    "masked-lm": language_model_wording("masked language model", "documents", "fill-mask", "masked tokens"),
    "causal-lm": language_model_wording("language model", "documents", "text-generation", "tokens"),
    "chat": language_model_wording("chat model", "conversations", "text-generation", "answer tokens"),
}  # fmt: skip


def name_validation_metric(report: Report) -> str:
    """Returns the name of the validation score while training, which for answers is a simpler score."""
    return WORDING[report["task"]].validation_metric or report["metric"]


def name_model(name: str) -> str:
    """Returns the name of a report's entry for the start of a sentence: `The student`, `Student-10x`."""
    return f"The {name}" if name in ("student", "teacher") else capitalize_first(name)


def describe_parity(entry: ModelEntry, parity: ParityEntry, compared: Comparison) -> str:
    """Returns sentences that compare an exported file with its source model."""
    model = f"{name_model(entry['name'])} on {format_runtime(entry)}"
    items = format_quantity(parity["rows"], compared.items)
    if "layers" in parity:
        outcome = f"processed {items}"
        if compared.decision:
            share = format_percent(parity["agreement"], 2)
            outcome = f"gave the {compared.decision} of the quantized PyTorch model for {share} of {items}"
        return (
            f"{model} computes what was trained: on the same input, each matrix product differs from that of its "
            f"training layer by at most {parity['layers']:.1e} of the largest value. Reloaded in a fresh process "
            f"({format_ms(parity['load_ms'])} ms, peak memory {parity['peak_bytes'] / 1e6:.0f} MB), it "
            f"{outcome}{_describe_scores(parity)}.{_describe_bits(parity)}"
        )
    if entry["precision"] == "int8":
        return (
            f"{model}, reloaded in a fresh process, reproduced the logits of the process that exported it to "
            f"within {parity['max_difference']:.1e} on {items}; its score includes what rounding to int8 costs."
            f"{_describe_bits(parity)}"
        )
    agreement = f", and {format_percent(parity['agreement'])} get the same {compared.decision}"
    return (
        f"{model}, reloaded in a fresh process, was compared with the trained model on {items}: the logits differ "
        f"by at most {parity['max_difference']:.1e}{agreement if compared.decision else ''}."
    )


def _describe_bits(parity: ParityEntry) -> str:
    if "weight_bits" not in parity:
        return ""
    return (
        f" Its weights use {parity['weight_bits']} of 8 bits: products of larger values would saturate on x86 "
        "processors without VNNI."
    )


def _describe_scores(parity: ParityEntry) -> str:
    if "score" not in parity:
        return ""
    return (
        f", with an accuracy of {format_percent(parity['score'], 2)} "
        f"({format_percent(parity['trained_score'], 2)} in PyTorch)"
    )
