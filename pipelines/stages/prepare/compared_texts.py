"""The texts that exported files are compared and timed on."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

if TYPE_CHECKING:
    import numpy as np

    from distill.data.rows.conversations import Conversations
    from distill.data.rows.tagged import Tagged
    from distill.data.splits.examples import Examples

Texts: TypeAlias = tuple[list[Any], list[str] | None]  # texts, or for a tagger lists of words, and their pairs


def sample_texts(examples: "Examples | Tagged", count: int, seed: int) -> Texts:
    """Returns at most `count` texts and their pairs, drawn by the seed."""
    import numpy as np

    return select_texts_and_pairs(examples, np.random.default_rng(seed).permutation(len(examples))[:count])


def select_texts_and_pairs(examples: "Examples | Tagged", rows: "Iterable[int]") -> Texts:
    """Returns the texts of these rows, and their pairs if there are any."""
    from distill.data.sources.text_column import select_texts

    numbers = list(rows)
    pairs = [examples.pairs[i] for i in numbers] if examples.pairs is not None else None
    return list(select_texts(cast("Sequence[Any]", examples.texts), numbers)), pairs


def hash_texts(examples: "Examples | Tagged") -> str:
    """Returns a hash of all texts and labels, because quantized targets are scored on them."""
    from pipelines.runs.manifest import hash_json

    pairs = None if examples.pairs is None else list(examples.pairs)
    return hash_json([list(examples.texts), pairs, examples.labels])


def as_plain_texts(part: "Examples | Tagged | Conversations") -> "Examples | Tagged":
    """Returns a split as texts; conversations become the texts of their messages."""
    from distill.data.rows.conversations import Conversations

    return part.message_texts() if isinstance(part, Conversations) else part


def measure_lengths(part: "Examples | Tagged | Conversations") -> "np.ndarray":
    """Returns the length of each sample in characters, of a tagger's in words; int64 [samples]."""
    import numpy as np

    plain = as_plain_texts(part)
    lengths = np.array([len(text) for text in plain.texts], dtype=np.int64)
    return lengths if plain.pairs is None else lengths + np.array([len(text) for text in plain.pairs])
