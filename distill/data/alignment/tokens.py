"""Token alignment and vocabulary matching between two tokenizers."""

from collections.abc import Callable

import numpy as np
from transformers import PreTrainedTokenizerBase

from distill.data.batches.token_blocks import find_end_token
from distill.errors import InputError

BLANK = "\u2581"  # SentencePiece's blank


def align_spans(offsets_a: np.ndarray, offsets_b: np.ndarray) -> np.ndarray:
    """Returns the smallest spans of tokens that begin and end at the same characters, in order.

    Two token boundaries match if neither tokenizer has a token for any character between them. A blank that belongs to
    no token (WordPiece) is ignored; where the other tokenizer has a token for it (byte-level BPE), alone or as the
    start of a word, it belongs to the token after it. Tokens that share a character, such as the bytes of one letter,
    are never separated. Together the spans cover every token that has characters, unless one side has no such tokens;
    a token without characters (a special token) is in a span only if it lies between tokens of that span.

    Args:
        offsets_a: Start and end character of each token of a text [tokens, 2], as returned by a fast tokenizer, in text
            order.
        offsets_b: The same for the other tokenizer's tokens of the same text.

    Returns:
        int64 [spans, 4]: start and end token of `a`, start and end token of `b`.
    """
    (tokens_a, *gaps_a), (tokens_b, *gaps_b) = _find_boundaries(offsets_a), _find_boundaries(offsets_b)
    if not len(tokens_a) or not len(tokens_b):
        return np.zeros((0, 4), np.int64)
    cuts = _match_boundaries(*gaps_a, *gaps_b)
    ends = np.concatenate([cuts, [[len(tokens_a), len(tokens_b)]]])
    starts = np.concatenate([[[0, 0]], cuts])
    spans = [
        each
        for tokens, start, end in zip((tokens_a, tokens_b), starts.T, ends.T, strict=True)
        for each in (tokens[start], tokens[end - 1] + 1)
    ]
    return np.stack(spans, 1)


def _find_boundaries(offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns the tokens that have characters, and the boundaries between them at which the text can be split.

    Returns:
        Indices of the tokens; and for each boundary the number of these tokens before it, the end of the last character
        before it, and the start of the first character after it.
    """
    offsets = np.asarray(offsets, np.int64).reshape(-1, 2)
    tokens = np.flatnonzero(offsets[:, 1] > offsets[:, 0])
    starts, ends = offsets[tokens].T
    before = np.maximum.accumulate(ends)[:-1]
    after = np.minimum.accumulate(starts[::-1])[::-1][1:]
    clean = np.flatnonzero(before <= after)
    return tokens, clean + 1, before[clean], after[clean]


def _match_boundaries(
    counts_a: np.ndarray, before_a: np.ndarray, after_a: np.ndarray,
    counts_b: np.ndarray, before_b: np.ndarray, after_b: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """Returns all pairs of matching boundaries as the number of tokens before each, int64 [pairs, 2]."""
    a = list(zip(counts_a.tolist(), before_a.tolist(), after_a.tolist(), strict=True))
    b = list(zip(counts_b.tolist(), before_b.tolist(), after_b.tolist(), strict=True))
    pairs, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        if a[i][2] < b[j][1]:
            i += 1
        elif b[j][2] < a[i][1]:
            j += 1
        else:
            pairs.append((a[i][0], b[j][0]))
            i, j = i + 1, j + 1
    return np.array(pairs, np.int64).reshape(-1, 2)


def check_offsets(*tokenizers: PreTrainedTokenizerBase) -> None:
    """Checks that every tokenizer is fast.

    Raises:
        InputError: A tokenizer does not provide the character offsets of its tokens.
    """
    for each in tokenizers:
        if not each.is_fast:
            raise InputError(
                f"tokenizer {type(each).__name__}: expected a fast one, which knows the characters of each token; "
                "tokens of two tokenizers couldn't be aligned"
            )


def shared_vocabulary(tokenizer_a: PreTrainedTokenizerBase, tokenizer_b: PreTrainedTokenizerBase) -> np.ndarray:
    """Returns pairs of ids that spell the same text, int64 [shared, 2], sorted by the first; no id is in two pairs.

    A token spells the bytes that it adds to a text, see `find_spellings`. The end tokens (eos, or sep if there is no
    eos) form a pair; other special tokens are paired if their names are equal.

    Raises:
        InputError: A tokenizer is slow, so its spellings aren't known.
    """
    check_offsets(tokenizer_a, tokenizer_b)
    a, b = find_spellings(tokenizer_a), find_spellings(tokenizer_b)
    return np.array(sorted((a[text], b[text]) for text in a.keys() & b.keys()), np.int64).reshape(-1, 2)


def find_spellings(tokenizer: PreTrainedTokenizerBase) -> dict[tuple[str, bytes], int]:
    """Returns the id of each spelling.

    Byte-level BPE writes each byte as one letter, with `Ġ` for a blank. SentencePiece writes `▁` for a blank and
    `<0x0A>` for a byte. WordPiece marks the continuation of a word with `##`, but does not record whether a blank
    precedes any other token: we assume one before a letter or digit, and none before punctuation or a Chinese
    character. So `Ġthe`, `▁the` and WordPiece's `the` have the same spelling, as do `ing` and `##ing`. If several ids
    share a spelling, it goes to a token that starts with neither `##` nor `<0` if there is one, then to the lowest id;
    the other ids are keyed by their token strings.
    """
    special, end = set(tokenizer.all_special_ids), find_end_token(tokenizer)
    added = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items()}
    spell = _choose_speller(tokenizer)
    ids: dict[tuple[str, bytes], int] = {}
    for token, number in sorted(tokenizer.get_vocab().items(), key=lambda each: (each[0][:2] in ("##", "<0"), each[1])):
        if number == end:
            key = ("end", b"")
        elif number in special:
            key = ("special", token.encode())
        else:
            key = ("text", added[number].encode() if number in added else spell(token))
        ids.setdefault(key if key not in ids else ("spare", token.encode()), number)
    return ids


def _choose_speller(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], bytes]:
    """Returns a function that maps a token of this tokenizer to the bytes that it adds to a text."""
    backend = tokenizer.backend_tokenizer
    mark = getattr(backend.model, "continuing_subword_prefix", None)
    if type(backend.model).__name__ in ("WordPiece", "WordLevel"):
        return lambda token: _spell_wordpiece(token, mark)
    if any("ByteLevel" in repr(part) for part in (backend.pre_tokenizer, backend.decoder)):
        letters = map_byte_letters()
        return lambda token: b"".join(letters.get(letter) or letter.encode() for letter in token)
    return _spell_sentencepiece


def _spell_wordpiece(token: str, mark: str | None) -> bytes:
    if mark and token.startswith(mark) and token != mark:
        return token.removeprefix(mark).encode()
    chinese = "\u3400" <= token[:1] <= "\u9fff"  # tokenized as single characters, with or without blanks
    return (" " + token if token[:1].isalnum() and not chinese else token).encode()


def _spell_sentencepiece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    return token.replace(BLANK, " ").encode()


def map_byte_letters() -> dict[str, bytes]:
    """Maps letters to the bytes that they represent: printable bytes to themselves, others from U+0100 on, in order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): bytes([byte]) for byte in printable} | {
        chr(256 + number): bytes([byte]) for number, byte in enumerate(others)
    }
