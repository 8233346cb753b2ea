"""Words that a masked language model proposes in place of each word of a row."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from distill.data.augment.noise import draw_some
from distill.data.augment.words import Words, is_mark, join_words, match_case
from distill.data.batches.encode import Batch

PROPOSALS = 15  # for each word, as in TinyBERT
_BATCH, _QUERIES = 64, 1024  # masked rows, and words of several tokens, at a time
_VOCABULARY = (
    20_000  # most frequent words of the data among which similar ones to a word of several pieces are searched
)
Proposals = list[list[str]]  # of each word of a row
ComputeLogits = Callable[[Batch], Tensor]  # at the batch's `positions`, [masks, vocabulary]


class _Masked(NamedTuple):
    row: int
    word: int
    ids: list[int]
    position: int


def propose_words(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Words],
    max_length: int,
    compute_logits: ComputeLogits,
    advance: Callable[[int], object] = lambda count: None,
) -> list[Proposals]:
    """Returns up to 15 words for each word of each row.

    A word that is one token is masked, and the model's most probable whole words take its place. A word of several
    tokens gets the most similar words of the data by the mean of its tokens' input embeddings. Marks, fixed words and
    words beyond `max_length` get none.

    Args:
        model: A model with a masked-language-modelling head.
        tokenizer: Its tokenizer.
        rows: The words of each row.
        max_length: Maximum length in tokens.
        compute_logits: Computes the model's logits at the masked positions of a batch only, one in each row; computing
            them at every position would take most of the time.
        advance: Called with the number of rows that are done.

    Source:
        Jiao et al., "TinyBERT" (Findings of EMNLP 2020), section 3.2 and algorithm 1. Their vectors of words are
        GloVe's; ours are the model's own embeddings.
    """
    proposals: list[Proposals] = [[[] for _ in words] for words in rows]
    whole = find_whole_words(tokenizer)
    split: list[tuple[int, int]] = []
    batch: list[_Masked] = []
    model.eval()
    for masked in _mask_words(tokenizer, rows, max_length, split, advance):
        batch.append(masked)
        if len(batch) == _BATCH:
            _fill_masks(compute_logits, tokenizer, batch, whole, proposals)
            batch = []
    _fill_masks(compute_logits, tokenizer, batch, whole, proposals)
    similar = find_similar_words(model, tokenizer, rows, {rows[row][word].text.lower() for row, word in split})
    for row, word in split:
        proposals[row][word] = similar[rows[row][word].text.lower()]
    for words, candidates in zip(rows, proposals, strict=True):
        for index, original in enumerate(words):
            candidates[index] = [each for each in candidates[index] if each != original.text.lower()][:PROPOSALS]
    return proposals


def _mask_words(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Words],
    max_length: int,
    split: list[tuple[int, int]],
    advance: Callable[[int], object],
) -> Iterator[_Masked]:
    """Yields every row once for each word that is one token, with a mask in its place; others go to `split`."""
    for number, words in enumerate(rows):
        encoded = tokenizer(join_words(words), truncation=True, max_length=max_length, return_offsets_mapping=True)
        ids = encoded["input_ids"]
        word_tokens: dict[int, list[int]] = {}
        ends = _find_ends(words)
        word = 0
        for index, (start, end) in enumerate(encoded["offset_mapping"]):
            if end > start:
                while word < len(ends) - 1 and start >= ends[word]:
                    word += 1
                word_tokens.setdefault(word, []).append(index)
        for word, tokens in word_tokens.items():
            if is_mark(words[word]) or words[word].is_fixed:
                continue
            if len(tokens) > 1:
                split.append((number, word))
                continue
            masked = list(ids)
            masked[tokens[0]] = tokenizer.mask_token_id
            yield _Masked(number, word, masked, tokens[0])
        advance(1)


def _find_ends(words: Words) -> list[int]:
    """Returns the end of each word in the row's text, in characters."""
    ends, end = [], 0
    for index, word in enumerate(words):
        end += (len(word.gap) if index else 0) + len(word.text)
        ends.append(end)
    return ends


def find_whole_words(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Returns id -> word for the tokens that are a word of letters, in lower case."""
    texts = tokenizer.batch_decode([[number] for number in range(len(tokenizer))])
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    special = set(tokenizer.all_special_ids)
    starts = any(token.startswith(("Ġ", "▁")) for token in tokens)
    return {
        number: text.strip().lower()
        for number, (token, text) in enumerate(zip(tokens, texts, strict=True))
        if number not in special
        and text.strip().isalpha()
        and not token.startswith("##")
        and (not starts or token.startswith(("Ġ", "▁")))
    }


@torch.no_grad()
def _fill_masks(
    compute_logits: ComputeLogits,
    tokenizer: PreTrainedTokenizerBase,
    batch: list[_Masked],
    whole: dict[int, str],
    proposals: list[Proposals],
) -> None:
    if not batch:
        return
    padded = dict(tokenizer.pad({"input_ids": [each.ids for each in batch]}, return_tensors="pt"))
    positions = torch.tensor([each.position for each in batch])
    padded["positions"] = torch.arange(padded["input_ids"].shape[1]) == positions[:, None]
    at_masks = compute_logits(padded)
    best = at_masks.topk(min(3 * PROPOSALS, at_masks.shape[-1])).indices.tolist()
    for masked, ids in zip(batch, best, strict=True):
        candidates = dict.fromkeys(whole[each] for each in ids if each in whole)
        proposals[masked.row][masked.word] = list(candidates)[: PROPOSALS + 1]


@torch.no_grad()
def find_similar_words(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Words], queries: set[str]
) -> dict[str, list[str]]:
    """Returns for each query the most similar words of the rows, by the mean of their tokens' input embeddings."""
    counts = Counter(word.text.lower() for row in rows for word in row if word.text.isalpha())
    known = [word for word, _ in counts.most_common(_VOCABULARY)]
    words = sorted(queries)
    if not known or not words:
        return dict.fromkeys(words, [])
    vectors = _embed(model, tokenizer, known)
    neighbors: dict[str, list[str]] = {}
    for start in range(0, len(words), _QUERIES):
        part = words[start : start + _QUERIES]
        similar = (_embed(model, tokenizer, part) @ vectors.T).topk(min(PROPOSALS + 1, len(known))).indices.tolist()
        neighbors |= {word: [known[each] for each in best] for word, best in zip(part, similar, strict=True)}
    return neighbors


def _embed(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, words: Sequence[str]) -> Tensor:
    """Returns a unit vector for each word, [words, width]."""
    ids = tokenizer(list(words), add_special_tokens=False)["input_ids"]
    flat = torch.tensor([each for row in ids for each in row], dtype=torch.long)
    starts = torch.tensor([0, *(len(row) for row in ids[:-1])]).cumsum(0)
    table = model.get_input_embeddings().weight
    assert isinstance(table, Tensor)
    table = table.float().cpu()
    return nn.functional.normalize(nn.functional.embedding_bag(flat, table, starts, mode="mean"), dim=-1)


def replace_by_proposals(words: Words, rate: float, rng: Random, proposals: Proposals) -> Words | None:
    """Replaces words by words that the model proposes, each with the same probability."""
    indices = [index for index, candidates in enumerate(proposals) if candidates]
    changed = list(words)
    for index in draw_some(indices, rate, rng):
        changed[index] = words[index]._replace(text=match_case(rng.choice(proposals[index]), words[index].text))
    return changed if indices else None
