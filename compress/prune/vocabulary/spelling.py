"""Tokens that a pruned vocabulary must keep, or else texts would give [UNK] or kept tokens couldn't form."""

import json
from collections.abc import Callable, Iterator
from typing import Any

from transformers import PreTrainedTokenizerBase

from compress.errors import CompressError

Spec = dict[str, Any]  # content of a tokenizer.json
Ranks = dict[tuple[str, str], int]  # pair of parts -> rank of their merge; lower ranks are applied first


def read_spec(tokenizer: PreTrainedTokenizerBase) -> Spec:
    """Returns the tokenizer.json of a tokenizer.

    Raises:
        CompressError: The tokenizer is slow, its model has no sub-word pieces, or it's a BPE with
            continuing_subword_prefix.
    """
    name = type(tokenizer).__name__
    if not tokenizer.is_fast:
        raise CompressError(
            f"tokenizer {name}: expected a fast one, with a tokenizer.json; found one in Python: its words can't be "
            "rewritten"
        )
    spec: Spec = json.loads(tokenizer.backend_tokenizer.to_str())
    model = spec["model"]
    if model["type"] not in NEEDS:
        raise CompressError(
            f"tokenizer {name}: expected {', '.join(NEEDS)}, found {model['type']}: it has no pieces, so words that "
            "went would become [UNK]"
        )
    if model["type"] == "BPE" and model["continuing_subword_prefix"]:
        raise CompressError(
            f"tokenizer {name}: expected a BPE without continuing_subword_prefix, found "
            f"{model['continuing_subword_prefix']!r}: its merges would be told apart wrongly"
        )
    return spec


def model_words(spec: Spec) -> dict[str, int]:
    """Returns token -> id of the tokenizer's model, without added tokens that are outside the model."""
    vocab = spec["model"]["vocab"]
    return vocab if isinstance(vocab, dict) else {word: i for i, (word, _) in enumerate(vocab)}


def names_of(spec: Spec) -> dict[int, str]:
    """Returns id -> token, including added tokens."""
    return {i: word for word, i in model_words(spec).items()} | {a["id"]: a["content"] for a in spec["added_tokens"]}


def special_words(tokenizer: PreTrainedTokenizerBase, spec: Spec) -> set[int]:
    """Returns the ids of special, added, padding and unknown tokens, and of tokens that the post-processor inserts."""
    model, words = spec["model"], model_words(spec)
    found = {added["id"] for added in spec["added_tokens"]} | set(tokenizer.all_special_ids)
    found |= {ids[place] for ids, place in processor_ids(spec["post_processor"])}
    if spec["padding"]:
        found.add(spec["padding"]["pad_id"])
    if model["type"] == "Unigram":
        found |= {model["unk_id"]} - {None}
    elif model["unk_token"] in words:
        found.add(words[model["unk_token"]])
    return found


def processor_ids(part: Spec | None) -> Iterator[tuple[list[Any], int]]:
    """Yields every position in a post-processor that holds an id, as (list, index)."""
    kind = part["type"] if part else None
    if not part:
        return
    if kind == "Sequence":
        for inner in part["processors"]:
            yield from processor_ids(inner)
    elif kind == "TemplateProcessing":
        for token in part["special_tokens"].values():
            yield from ((token["ids"], i) for i in range(len(token["ids"])))
    elif kind in ("BertProcessing", "RobertaProcessing"):
        yield part["sep"], 1
        yield part["cls"], 1


def spelling_words(tokenizer: PreTrainedTokenizerBase, spec: Spec) -> set[int]:
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
    words = {word: i for word, i in model_words(spec).items() if word not in added}
    found = NEEDS[spec["model"]["type"]](tokenizer, spec["model"], words)
    if spec["model"].get("byte_fallback"):
        found |= {i for word, i in words.items() if len(word) == 6 and word.startswith("<0x") and word[-1] == ">"}
    return found


def wordpiece_needs(tokenizer: PreTrainedTokenizerBase, model: Spec, words: dict[str, int]) -> set[int]:
    prefix = model["continuing_subword_prefix"]
    inside = {word: word[len(prefix) :] for word in words if word.startswith(prefix) and word != prefix}
    starts = {word: word for word in words if word not in inside or starts_with_prefix(tokenizer, prefix)}
    first, later = {w for w in starts if len(w) == 1}, {content for content in inside.values() if len(content) == 1}
    needed = {words[word] for word in first} | {words[word] for word, content in inside.items() if len(content) == 1}
    needed |= {words[word] for word in starts if word[0] not in first or not later.issuperset(word[1:])}
    for word, content in inside.items():
        # WordPiece matches the longest token first: a new split may end inside this one, before an unmatched character.
        lost = set(content[1:]) - later
        if lost:
            raise CompressError(
                f"tokenizer: piece {word!r} has {sorted(lost)[0]!r}, expected {prefix + sorted(lost)[0]!r} to be a "
                "piece, found none: a text whose words are spelt anew could become [UNK]"
            )
        if content[0] not in later:
            needed.add(words[word])
    return needed


def starts_with_prefix(tokenizer: PreTrainedTokenizerBase, prefix: str) -> bool:
    """Returns whether a text's word may start with the prefix, where continuation tokens would then match too."""
    return any(word.startswith(prefix) for word in pre_tokens(tokenizer, f"{prefix}a"))


def pre_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[str]:
    """Returns the normalized and pre-tokenized words of a text, the input of the tokenizer's model."""
    backend = tokenizer.backend_tokenizer
    text = backend.normalizer.normalize_str(text) if backend.normalizer else text
    return [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)] if backend.pre_tokenizer else [text]


def can_occur(tokenizer: PreTrainedTokenizerBase, spec: Spec, word: str) -> bool:
    """Returns False for a WordPiece token that can't occur because pre-tokenization splits texts inside it."""
    model = spec["model"]
    content = word.removeprefix(model.get("continuing_subword_prefix") or "")
    return model["type"] != "WordPiece" or pre_tokens(tokenizer, content) == [content]


def bpe_needs(tokenizer: PreTrainedTokenizerBase, model: Spec, words: dict[str, int]) -> set[int]:
    suffix = model["end_of_word_suffix"] or ""
    parts = {word: symbols(word, suffix) for word in words}
    return {words[w] for w, letters in parts.items() if len(letters) == 1 or any(s not in words for s in letters)}


def unigram_needs(tokenizer: PreTrainedTokenizerBase, model: Spec, words: dict[str, int]) -> set[int]:
    lowest = min(range(len(model["vocab"])), key=lambda i: model["vocab"][i][1])
    single = {word for word in words if len(word) == 1}
    return {lowest} | {i for word, i in words.items() if word in single or not single.issuperset(word)}


NEEDS: dict[str, Callable[[PreTrainedTokenizerBase, Spec, dict[str, int]], set[int]]] = {
    "WordPiece": wordpiece_needs,
    "BPE": bpe_needs,
    "Unigram": unigram_needs,
}


def parts_of(spec: Spec) -> Callable[[int], set[int]]:
    """Returns a function from a token's id to ids that must stay with it: for BPE all intermediate merge results."""
    model, words, names = spec["model"], model_words(spec), names_of(spec)
    if model["type"] != "BPE":
        return lambda word: set()
    ranks, suffix = merge_ranks(model), model["end_of_word_suffix"] or ""
    return lambda word: {words[part] for part in derivation(names[word], ranks, suffix)}


def merge_ranks(model: Spec) -> Ranks:
    return {tuple(m.split(" ") if isinstance(m, str) else m): rank for rank, m in enumerate(model["merges"])}


def symbols(word: str, suffix: str) -> list[str]:
    """Returns the initial symbols of a token before any merge: its characters, the last one with the suffix."""
    if suffix and word.endswith(suffix) and word != suffix:
        return [*word[: -len(suffix) - 1], word[-len(suffix) - 1 :]]
    return list(word)


def derivation(word: str, ranks: Ranks, suffix: str) -> set[str]:
    """Returns all results of the merges that produce `word`, itself included; empty if the merges don't produce it.

    The merges inside a token are the same in every text that contains it, since no merge crosses its boundaries there.
    """
    parts, made = symbols(word, suffix), set()
    while len(parts) > 1:
        pairs = list(zip(parts, parts[1:], strict=False))
        place = min(range(len(pairs)), key=lambda i: ranks.get(pairs[i], len(ranks)))
        if pairs[place] not in ranks:
            return set()
        parts[place : place + 2] = ["".join(pairs[place])]
        made.add(parts[place])
    return made
