"""Tokenizers with a reduced vocabulary: tokenizer.json rewritten, with ids renumbered in their old order."""

import copy
import json
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from jaxtyping import Int64
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from compress.errors import CompressError
from compress.prune.vocabulary.spelling import (
    TokenizerSpec,
    find_processor_ids,
    find_special_ids,
    find_spelling_ids,
    get_tokens,
    make_merge_finder,
    read_spec,
)

Ids: TypeAlias = Sequence[int] | np.ndarray
REMOVED = -1  # new id of a removed token


def prune_tokenizer(tokenizer: PreTrainedTokenizerBase, ids: Ids) -> PreTrainedTokenizerBase:
    """Returns a copy of a fast tokenizer reduced to the tokens `ids`; token `ids[i]` gets the id i.

    Supports WordPiece, BPE and Unigram. A text that uses no removed token is tokenized as before; other texts are split
    into the remaining tokens, with [UNK] only where the original tokenizer gives it. Special tokens, padding,
    truncation and all other settings are preserved.

    Args:
        tokenizer: The tokenizer to reduce; it isn't modified.
        ids: Ascending ids, as returned by `choose_tokens`.

    Raises:
        CompressError: The tokenizer is slow or its model has no sub-word pieces; ids aren't ascending, aren't in the
            vocabulary, or lack a special token or a token that spelling needs.
    """
    spec = read_spec(tokenizer)
    kept_ids = _check_ids(ids, get_tokens(spec))
    _check_complete(tokenizer, spec, set(kept_ids.tolist()))
    remap = remap_ids(max(get_tokens(spec)) + 1, kept_ids)
    expected = {token: int(remap[i]) for i, token in get_tokens(spec).items() if remap[i] != REMOVED}
    _renumber_spec(spec, remap)
    pruned = copy.deepcopy(tokenizer)
    pruned._tokenizer = Tokenizer.from_str(json.dumps(spec))
    _replace_cached_vocab(pruned, spec["model"])
    if pruned.get_vocab() != expected:
        raise CompressError(
            f"tokenizer {type(tokenizer).__name__}: expected {len(expected)} tokens with the ids 0 to "
            f"{len(expected) - 1}, found {len(pruned.get_vocab())} or other ids: they would select the wrong rows"
        )
    return pruned


def _check_ids(ids: Ids, tokens: dict[int, str]) -> Int64[np.ndarray, "kept"]:
    kept_ids = np.asarray(ids)
    if (
        kept_ids.ndim != 1
        or not len(kept_ids)
        or kept_ids.dtype.kind not in "iu"
        or (np.diff(kept_ids.astype(np.int64)) <= 0).any()
    ):
        raise CompressError(
            f"ids: expected ascending integers, found {kept_ids.dtype} of shape {kept_ids.shape}: tokens would get "
            "the rows of others"
        )
    unknown = [i for i in kept_ids.tolist() if i not in tokens]
    if unknown:
        raise CompressError(
            f"ids: expected ids of the tokenizer's {len(tokens)} tokens, found {unknown[0]}: there is no such token"
        )
    return kept_ids.astype(np.int64)


def _check_complete(tokenizer: PreTrainedTokenizerBase, spec: TokenizerSpec, kept_ids: set[int]) -> None:
    """Checks that `kept_ids` contains all special tokens, tokens that spelling needs and parts of BPE merges."""
    tokens, find_merges = get_tokens(spec), make_merge_finder(spec)
    checks = (
        (
            find_special_ids(tokenizer, spec),
            "special or added tokens",
            "other tokens would frame and pad texts",
        ),
        (find_spelling_ids(tokenizer, spec), "tokens that spelling needs", "texts could become [UNK]"),
        (
            {part for i in kept_ids for part in find_merges(i)},
            "results of merges",
            "tokens merged from them would never occur",
        ),
    )
    for needed, what, consequence in checks:
        missing = sorted(needed - kept_ids)
        if missing:
            raise CompressError(
                f"ids: expected all {what}, found {len(missing)} missing, such as {tokens.get(missing[0])!r} "
                f"(id {missing[0]}): {consequence}"
            )


def _renumber_spec(spec: TokenizerSpec, remap: Int64[np.ndarray, "vocab"]) -> None:
    """Removes tokens from the tokenizer.json and renumbers the others, in place."""

    def renumber(old: int) -> int:
        return int(remap[old])

    _renumber_model(spec["model"], remap)
    spec["added_tokens"] = [token | {"id": renumber(token["id"])} for token in spec["added_tokens"]]
    for ids, index in find_processor_ids(spec["post_processor"]):
        ids[index] = renumber(ids[index])
    if spec["padding"]:
        spec["padding"]["pad_id"] = renumber(spec["padding"]["pad_id"])


def _renumber_model(model: TokenizerSpec, remap: Int64[np.ndarray, "vocab"]) -> None:
    if model["type"] == "Unigram":
        model["vocab"] = [entry for i, entry in enumerate(model["vocab"]) if remap[i] != REMOVED]
        model["unk_id"] = None if model["unk_id"] is None else int(remap[model["unk_id"]])
        return
    model["vocab"] = {token: int(remap[i]) for token, i in model["vocab"].items() if remap[i] != REMOVED}
    if model["type"] == "BPE":
        pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
        model["merges"] = [p for p in pairs if {p[0], p[1], p[0] + p[1]} <= model["vocab"].keys()]


def _replace_cached_vocab(tokenizer: PreTrainedTokenizerBase, model: TokenizerSpec) -> None:
    """Replaces the copies of the vocabulary that the tokenizer's Python class stores beside its backend."""
    if hasattr(tokenizer, "_vocab"):
        tokenizer._vocab = model["vocab"] if isinstance(model["vocab"], dict) else [(w, s) for w, s in model["vocab"]]
    if hasattr(tokenizer, "_merges"):
        tokenizer._merges = [tuple(pair) for pair in model["merges"]]
    if hasattr(tokenizer, "vocab_file"):
        tokenizer.vocab_file = None  # it contains the old vocabulary, and saving copies it in some formats


def remap_ids(size: int, ids: Ids) -> Int64[np.ndarray, "vocab"]:
    """Returns the new id of every old id, `REMOVED` (-1) for removed tokens.

    Args:
        size: Number of ids in the old vocabulary.
        ids: Ascending old ids to keep; `ids[i]` becomes i.

    Raises:
        CompressError: An id is outside 0 to size - 1.
    """
    kept_ids = np.asarray(ids, np.int64)
    if len(kept_ids) and not 0 <= kept_ids.min() <= kept_ids.max() < size:
        raise CompressError(
            f"ids: expected 0 to {size - 1}, found {kept_ids.min()} to {kept_ids.max()}: there is no such token"
        )
    remap = np.full(size, REMOVED, np.int64)
    remap[kept_ids] = np.arange(len(kept_ids))
    return remap


def have_same_tokens(first: PreTrainedTokenizerBase, second: PreTrainedTokenizerBase, text: str) -> bool:
    """Returns whether both tokenizers split the text into the same tokens, regardless of their ids."""
    return first.tokenize(text) == second.tokenize(text)
