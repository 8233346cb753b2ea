"""Tokens that a pruned vocabulary must keep, so that no text becomes [UNK] and every kept token can be merged."""

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, TypeAlias

from transformers import PreTrainedTokenizerBase

from compress.errors import CompressError

TokenizerSpec: TypeAlias = dict[str, Any]  # JSON content of a tokenizer.json
_Ranks: TypeAlias = dict[tuple[str, str], int]  # pair of parts -> rank of their merge; lower ranks are applied first


def read_spec(tokenizer: PreTrainedTokenizerBase) -> TokenizerSpec:
    """Returns the tokenizer.json of a tokenizer.

    Raises:
        CompressError: The tokenizer is slow, its model has no sub-word pieces, or it's a BPE with
            continuing_subword_prefix.
    """
    name = type(tokenizer).__name__
    if not tokenizer.is_fast:
        raise CompressError(
            f"tokenizer {name}: expected a fast one, with a tokenizer.json, found one in Python: its vocabulary "
            "can't be reduced"
        )
    spec: TokenizerSpec = json.loads(tokenizer.backend_tokenizer.to_str())
    model = spec["model"]
    if model["type"] not in SPELLING_RULES:
        raise CompressError(
            f"tokenizer {name}: expected {', '.join(SPELLING_RULES)}, found {model['type']}: it has no sub-word "
            "pieces, so removed tokens would become [UNK]"
        )
    if model["type"] == "BPE" and model["continuing_subword_prefix"]:
        raise CompressError(
            f"tokenizer {name}: expected a BPE without continuing_subword_prefix, found "
            f"{model['continuing_subword_prefix']!r}: its merges would be parsed wrongly"
        )
    return spec


def get_model_tokens(spec: TokenizerSpec) -> dict[str, int]:
    """Returns token -> id of the tokenizer's model, without added tokens that are outside the model."""
    vocab = spec["model"]["vocab"]
    return vocab if isinstance(vocab, dict) else {token: i for i, (token, _) in enumerate(vocab)}


def get_tokens(spec: TokenizerSpec) -> dict[int, str]:
    """Returns id -> token, including added tokens."""
    added = {token["id"]: token["content"] for token in spec["added_tokens"]}
    return {i: token for token, i in get_model_tokens(spec).items()} | added


def find_special_ids(tokenizer: PreTrainedTokenizerBase, spec: TokenizerSpec) -> set[int]:
    """Returns the ids of special, added, padding and unknown tokens, and of tokens that the post-processor inserts."""
    model, tokens = spec["model"], get_model_tokens(spec)
    special_ids = {added["id"] for added in spec["added_tokens"]} | set(tokenizer.all_special_ids)
    special_ids |= {ids[index] for ids, index in find_processor_ids(spec["post_processor"])}
    if spec["padding"]:
        special_ids.add(spec["padding"]["pad_id"])
    if model["type"] == "Unigram":
        special_ids |= {model["unk_id"]} - {None}
    elif model["unk_token"] in tokens:
        special_ids.add(tokens[model["unk_token"]])
    return special_ids


def find_processor_ids(processor: TokenizerSpec | None) -> Iterator[tuple[list[Any], int]]:
    """Yields every position in a post-processor that holds an id, as (list, index)."""
    if not processor:
        return
    kind = processor["type"]
    if kind == "Sequence":
        for inner in processor["processors"]:
            yield from find_processor_ids(inner)
    elif kind == "TemplateProcessing":
        for token in processor["special_tokens"].values():
            yield from ((token["ids"], i) for i in range(len(token["ids"])))
    elif kind in ("BertProcessing", "RobertaProcessing"):
        yield processor["sep"], 1
        yield processor["cls"], 1


def find_spelling_ids(tokenizer: PreTrainedTokenizerBase, spec: TokenizerSpec) -> set[int]:
    """Returns the ids of the tokens into which every other token can be split.

    WordPiece: each character, as the start of a word and as a continuation. BPE: the characters or bytes that merges
    start from. Unigram: single characters, and the token with the lowest score, which sets the score of [UNK]. For all
    of them also the byte tokens, and the tokens with a character that isn't a token itself, since these couldn't be
    split. (A Unigram model compares the scores of [UNK] and such a token, so for Unigram, and only for such characters,
    there is no guarantee.)

    Raises:
        CompressError: The vocabulary is a WordPiece for which this can't be guaranteed.
    """
    added = {token["content"] for token in spec["added_tokens"]}
    tokens = {token: i for token, i in get_model_tokens(spec).items() if token not in added}
    spelling_ids = SPELLING_RULES[spec["model"]["type"]](tokenizer, spec["model"], tokens)
    if spec["model"].get("byte_fallback"):
        spelling_ids |= {
            i for token, i in tokens.items() if len(token) == 6 and token.startswith("<0x") and token[-1] == ">"
        }
    return spelling_ids


def _find_wordpiece_ids(tokenizer: PreTrainedTokenizerBase, model: TokenizerSpec, tokens: dict[str, int]) -> set[int]:
    prefix = model["continuing_subword_prefix"]
    continuations = {token: token[len(prefix) :] for token in tokens if token.startswith(prefix) and token != prefix}
    starts = [token for token in tokens if token not in continuations or _starts_with_prefix(tokenizer, prefix)]
    first = {token for token in starts if len(token) == 1}
    later = {content for content in continuations.values() if len(content) == 1}
    needed = {tokens[token] for token in first}
    needed |= {tokens[token] for token, content in continuations.items() if len(content) == 1}
    needed |= {tokens[token] for token in starts if token[0] not in first or not later.issuperset(token[1:])}
    for token, content in continuations.items():
        # WordPiece matches the longest token first: a new split may end inside this one, before an unmatched character.
        missing = set(content[1:]) - later
        if missing:
            character = min(missing)
            raise CompressError(
                f"tokenizer: expected a token {prefix + character!r} for the {character!r} in {token!r}, found none: a "
                "text with removed tokens could become [UNK]"
            )
        if content[0] not in later:
            needed.add(tokens[token])
    return needed


def _starts_with_prefix(tokenizer: PreTrainedTokenizerBase, prefix: str) -> bool:
    """Returns whether a word of a text may start with the prefix, so that continuation tokens would match it too."""
    return any(word.startswith(prefix) for word in pretokenize(tokenizer, f"{prefix}a"))


def pretokenize(tokenizer: PreTrainedTokenizerBase, text: str) -> list[str]:
    """Returns the normalized and pre-tokenized words of a text, the input of the tokenizer's model."""
    backend = tokenizer.backend_tokenizer
    text = backend.normalizer.normalize_str(text) if backend.normalizer else text
    return [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)] if backend.pre_tokenizer else [text]


def can_occur(tokenizer: PreTrainedTokenizerBase, spec: TokenizerSpec, token: str) -> bool:
    """Returns False for a WordPiece token that can't occur because pre-tokenization splits texts inside it."""
    model = spec["model"]
    content = token.removeprefix(model.get("continuing_subword_prefix") or "")
    return model["type"] != "WordPiece" or pretokenize(tokenizer, content) == [content]


def _find_bpe_ids(tokenizer: PreTrainedTokenizerBase, model: TokenizerSpec, tokens: dict[str, int]) -> set[int]:
    suffix = model["end_of_word_suffix"] or ""
    symbols = {token: _split_symbols(token, suffix) for token in tokens}
    return {tokens[token] for token, parts in symbols.items() if len(parts) == 1 or any(s not in tokens for s in parts)}


def _find_unigram_ids(tokenizer: PreTrainedTokenizerBase, model: TokenizerSpec, tokens: dict[str, int]) -> set[int]:
    lowest = min(range(len(model["vocab"])), key=lambda i: model["vocab"][i][1])
    single = {token for token in tokens if len(token) == 1}
    return {lowest} | {i for token, i in tokens.items() if token in single or not single.issuperset(token)}


SPELLING_RULES: dict[str, Callable[[PreTrainedTokenizerBase, TokenizerSpec, dict[str, int]], set[int]]] = {
    "WordPiece": _find_wordpiece_ids,
    "BPE": _find_bpe_ids,
    "Unigram": _find_unigram_ids,
}


def make_merge_finder(spec: TokenizerSpec) -> Callable[[int], set[int]]:
    """Returns a function from a token's id to ids that must stay with it: for BPE all intermediate merge results."""
    model, ids, tokens = spec["model"], get_model_tokens(spec), get_tokens(spec)
    if model["type"] != "BPE":
        return lambda token_id: set()
    ranks, suffix = _rank_merges(model), model["end_of_word_suffix"] or ""
    return lambda token_id: {ids[token] for token in derive_merges(tokens[token_id], ranks, suffix)}


def _rank_merges(model: TokenizerSpec) -> _Ranks:
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
    return {(first, second): rank for rank, (first, second) in enumerate(pairs)}


def _split_symbols(token: str, suffix: str) -> list[str]:
    """Returns the initial symbols of a token before any merge: its characters, the last one with the suffix."""
    if suffix and token.endswith(suffix) and token != suffix:
        return [*token[: -len(suffix) - 1], token[-len(suffix) - 1 :]]
    return list(token)


def derive_merges(token: str, ranks: _Ranks, suffix: str) -> set[str]:
    """Returns all results of the merges that produce `token`, itself included; empty if the merges don't produce it.

    The merges inside a token are the same in every text that contains it, since no merge crosses its boundaries there.
    """
    symbols, merged = _split_symbols(token, suffix), set()
    while len(symbols) > 1:
        pairs = list(pairwise(symbols))
        index = min(range(len(pairs)), key=lambda i: ranks.get(pairs[i], len(ranks)))
        if pairs[index] not in ranks:
            return set()
        symbols[index : index + 2] = ["".join(pairs[index])]
        merged.add(symbols[index])
    return merged
