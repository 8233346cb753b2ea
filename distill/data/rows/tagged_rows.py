"""Token ids of tagged sentences: each word's tag is at its first token."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from distill.data.batches.encode import TokenRows, pad_rows
from distill.data.rows.tagged import Tagged
from distill.errors import InputError
from distill.losses.logits import IGNORED

BLANKS = ("Ġ", "▁", "▁▁")  # tokens that are only blanks, in byte-level and SentencePiece tokenizers


@dataclass(frozen=True)
class TaggedRows(TokenRows):
    """Unpadded token ids of tagged sentences.

    A word is represented by its first token.

    Args:
        input_ids, token_type_ids: As in `Encoded`.
        firsts: Whether a token is the first of a word, bool [length].
        labels: The word's tag at its first token, and IGNORED elsewhere, int64 [length].
        words: Indices of the words that have a token.
        tags: Tag ids of all words, including truncated ones.
        truncated: Number of truncated sentences.
    """

    input_ids: list[np.ndarray]
    token_type_ids: list[np.ndarray] | None
    firsts: list[np.ndarray]
    labels: list[np.ndarray]
    words: list[list[int]]
    tags: list[list[int]]
    truncated: int

    @property
    def positions(self) -> list[np.ndarray]:
        """The first tokens of words, bool [length] each."""
        return self.firsts

    @property
    def notes(self) -> dict[str, int]:
        """The number of truncated sentences, if there are any."""
        return {"cut": self.truncated} if self.truncated else {}

    def join(self, other: "TaggedRows") -> "TaggedRows":
        """Returns the rows of both, in order; rows without tags still have `words`."""
        if not len(other):
            return self
        return TaggedRows(
            *self.join_tokens(other),
            self.firsts + other.firsts,
            self.labels + other.labels,
            self.words + other.words,
            self.tags + other.tags,
            self.truncated + other.truncated,
        )

    def collate(self, rows: Sequence[int] | np.ndarray, pad_id: int, epoch: int = 0) -> dict[str, Tensor]:
        """Pads the rows to the longest one: int64 [batch, length] each, `positions` bool."""
        return self.tokens(rows, pad_id) | {"labels": pad_rows([self.labels[i] for i in rows], IGNORED)}


def encode_tagged(tokenizer: PreTrainedTokenizerBase, part: Tagged, max_length: int) -> TaggedRows:
    """Tokenizes the words, truncated to the smaller of `max_length` and the tokenizer's own limit.

    A word without tokens (a blank, a control character) gets no position, like a word beyond the limit.

    Raises:
        InputError: The tokenizer does not provide the word of each token.
    """
    if not tokenizer.is_fast:
        raise InputError(
            f"tokenizer {type(tokenizer).__name__}: expected a fast one, which knows the word of each token; tags "
            "couldn't be assigned to tokens"
        )
    if not len(part):
        return TaggedRows([], None, [], [], [], [], 0)
    limit = min(max_length, tokenizer.model_max_length)
    strips = _adds_blanks(tokenizer)
    texts = [[word.removeprefix(" ") or word for word in row] for row in part.texts] if strips else part.texts
    encoded = tokenizer(texts, is_split_into_words=True, truncation=True, max_length=limit)
    firsts, labels, indices, truncated = [], [], [], 0
    vocabulary = tokenizer.get_vocab()
    # Encoders (tokenizers with a cls and a mask token) are trained with a word's tag on its very first token.
    is_encoder = tokenizer.cls_token_id is not None and tokenizer.mask_token_id is not None
    blanks = set() if is_encoder else {vocabulary[each] for each in BLANKS if each in vocabulary}
    for row, words in enumerate(part.texts):
        ids = encoded["input_ids"][row]
        of_tokens = _skip_blanks(encoded.word_ids(row), ids, blanks)
        pairs = zip(of_tokens, [None, *of_tokens], strict=False)
        first = np.array([word is not None and word != before for word, before in pairs])
        tags = part.labels[row] if part.labels else [IGNORED] * len(words)
        firsts.append(first)
        starting = [word if begins else None for word, begins in zip(of_tokens, first, strict=True)]
        labels.append(np.array([IGNORED if word is None else tags[word] for word in starting]))
        indices.append([word for word in starting if word is not None])
        truncated += len(ids) == limit and indices[-1][-1:] != [len(words) - 1]
    types = encoded.get("token_type_ids")
    return TaggedRows(
        [np.asarray(row, np.int64) for row in encoded["input_ids"]],
        [np.asarray(row, np.int64) for row in types] if types is not None else None,
        firsts,
        labels,
        indices,
        part.labels,
        truncated,
    )


def _adds_blanks(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Returns whether the tokenizer adds a blank even before a word that starts with one, as Llama 2's does."""
    one, two = (tokenizer.backend_tokenizer.encode([word], is_pretokenized=True, add_special_tokens=False).tokens
                for word in ("a", " a"))  # fmt: skip
    return len(two) > len(one) and one[0].startswith(BLANKS[1])


def _skip_blanks(words: list[int | None], ids: list[int], blanks: Collection[int]) -> list[int | None]:
    """Returns the word of each token, but None for a separate blank token at the start of a word.

    A decoder would otherwise tag the blank before it has seen the word, for example where Qwen's and Llama 3's
    tokenizers split ` 5`.
    """
    before = [None, *words]
    return [None if ids[i] in blanks and before[i] != word else word for i, word in enumerate(words)]
