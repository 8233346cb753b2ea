"""Filters of rows: language, length and symbols."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from distill.data.clean.config import read_length, read_share
from distill.errors import InputError

SURE = 0.8  # probability of a language from which on a row counts as written in it
_SAMPLE = 2000  # rows from which the language of most is taken

Reason = Callable[[str], str]  # a text -> why its row is dropped; empty if it stays


def build_length_filter(value: str) -> Reason:
    """Returns a filter of texts with too few or too many words."""
    minimum, maximum = read_length(value)

    def judge(text: str) -> str:
        words = len(text.split())
        return f"{words} words" if words < minimum or (maximum is not None and words > maximum) else ""

    return judge


def build_symbol_filter(value: str) -> Reason:
    """Returns a filter of texts with too large a share of characters that are neither letters nor blanks."""
    limit = read_share(value, "symbols", 0.0)

    def judge(text: str) -> str:
        symbols = sum(not (each.isalpha() or each.isspace()) for each in text)
        share = symbols / max(1, len(text))
        return f"{share:.0%} symbols" if share > limit else ""

    return judge


def build_language_filter(texts: Iterable[str], wanted: str = "") -> Reason:
    """Returns a filter of texts in another language than `wanted`, or than most of the texts.

    Only rows are dropped whose language is at least SURE. Source: langid.py (Lui and Baldwin 2012), by py3langid, whose
    probabilities are tempered by the length of the text.

    Raises:
        InputError: py3langid isn't installed or doesn't know the language.
    """
    identifier = load_identifier()
    known = set(identifier.nb_classes)
    if wanted and wanted not in known:
        raise InputError(
            f"data.clean: step language: expected one of {', '.join(sorted(known))}, found {wanted!r}: every row would "
            "be dropped"
        )

    def identify(text: str) -> str:
        language, probability = identifier.classify(text)
        return str(language) if probability >= SURE else ""

    if not wanted:
        counts = Counter(filter(None, (identify(text) for text, _ in zip(texts, range(_SAMPLE), strict=False))))
        wanted = counts.most_common(1)[0][0] if counts else ""

    def judge(text: str) -> str:
        language = identify(text)
        return f"language {language}, not {wanted}" if wanted and language and language != wanted else ""

    return judge


def load_identifier() -> Any:
    """Returns py3langid's identifier of languages.

    Raises:
        InputError: The package isn't installed.
    """
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError as error:
        raise InputError(
            "data.clean: step language: expected the package py3langid, found none: languages can't be told apart; "
            "install it with pip install -e '.[clean]'"
        ) from error
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
