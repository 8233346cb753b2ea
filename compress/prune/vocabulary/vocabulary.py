"""Vocabulary pruning: counting and choosing tokens, and slicing the model's weights along the vocabulary."""

import copy
import math
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from compress.errors import CompressError
from compress.prune.config import DEFAULT_UNSEEN
from compress.prune.vocabulary.spelling import (
    can_occur,
    find_special_ids,
    find_spelling_ids,
    get_tokens,
    make_merge_finder,
    read_spec,
)
from compress.prune.vocabulary.tokenizer import REMOVED, Ids, prune_tokenizer, remap_ids

TokenIds: TypeAlias = "int | list[TokenIds] | tuple[TokenIds, ...] | None"
TEXTS_PER_CALL = 1000  # of the tokenizer
DEFAULT_COVERAGE = 0.9999


def count_tokens(
    tokenizer: PreTrainedTokenizerBase, texts: Iterable[str] | Iterable[Sequence[str]]
) -> Int64[np.ndarray, "vocab"]:
    """Returns how often each id occurs in the texts, with special tokens added and without truncation.

    The texts are strings or sequences of words.

    Raises:
        CompressError: There are no texts, or `texts` is a single string.
    """
    if isinstance(texts, str):
        raise CompressError("texts: expected several strings, found one: its characters would be counted as texts")
    size = max(tokenizer.get_vocab().values()) + 1
    counts, remaining = np.zeros(size, np.int64), iter(texts)
    while batch := list(islice(remaining, TEXTS_PER_CALL)):
        encoded = tokenizer(
            batch,
            truncation=False,
            padding=False,
            return_attention_mask=False,
            verbose=False,
            is_split_into_words=not isinstance(batch[0], str),
        )
        counts += np.bincount(
            np.concatenate([np.asarray(row, np.int64) for row in encoded["input_ids"]]), minlength=size
        )
    if not counts.any():
        raise CompressError("texts: expected a corpus, found no tokens: every token would look unused")
    return counts


def choose_tokens(
    tokenizer: PreTrainedTokenizerBase,
    counts: Int64[np.ndarray, "vocab"],
    *,
    coverage: float = DEFAULT_COVERAGE,
    unseen: float = DEFAULT_UNSEEN,
    max_tokens: int | None = None,
) -> Int64[np.ndarray, "kept"]:
    """Returns the ids of the tokens to keep, in ascending order.

    First come special and added tokens and the tokens that spelling needs (see `compress.prune.vocabulary.spelling`);
    then the most frequent tokens, the lower id first among equals, until they cover `coverage` of all uses; then tokens
    that the corpus lacks. A BPE token also keeps the intermediate results of its merges.

    Unseen text uses tokens that the corpus lacks at a rate estimated by the number of tokens that the corpus uses once,
    relative to all its uses. Of these tokens the lower ids are kept: the vocabulary of BERT approximately, those of BPE
    and Unigram by construction, are sorted by frequency in pre-training. How many are kept is inferred from the ids of
    the tokens used once, since unseen tokens have a similar id distribution. WordPiece tokens that no text produces,
    such as BERT's [unused7], are skipped.

    Args:
        tokenizer: A fast tokenizer.
        counts: Uses of each id, from `count_tokens`.
        coverage: Share of the corpus's uses in (0, 1]; 1 keeps every token that occurs.
        unseen: Share of the uses in unseen text, in [0, 1], that may fall on tokens removed because the corpus lacks
            them; 0 keeps all of them (or as many as `max_tokens` allows), 1 none.
        max_tokens: Maximum number of tokens to keep; it takes precedence over `coverage` and `unseen`.

    Raises:
        CompressError: The tokenizer is slow; a share is out of range; counts belong to another vocabulary or are all 0;
            `max_tokens` is below the number of special tokens and tokens that spelling needs.

    Source: rate of unseen tokens by Good 1953, The Population Frequencies of Species and the Estimation of Population
        Parameters (Biometrika 40), N1 / N; that their ids are distributed as those of the tokens used once is our
        assumption.
    """
    spec = read_spec(tokenizer)
    tokens, find_merges = get_tokens(spec), make_merge_finder(spec)
    _check_counts(counts, coverage, unseen, max(tokens) + 1)
    needed = find_special_ids(tokenizer, spec) | find_spelling_ids(tokenizer, spec)
    limit = len(tokens) if max_tokens is None else max_tokens
    if limit < len(needed):
        raise CompressError(
            f"max_tokens: expected at least {len(needed)}, the special tokens and those that spelling needs, found "
            f"{limit}: texts could become [UNK]"
        )
    kept_ids = set(needed)
    covered, goal = int(counts[sorted(kept_ids)].sum()), coverage * int(counts.sum())
    for i in np.argsort(-counts, kind="stable").tolist():
        if covered >= goal or not counts[i]:
            break
        covered += int(counts[_add_tokens(kept_ids, {i} | find_merges(i), limit)].sum())
    last = _find_last_unseen(counts, needed, unseen)
    for i in sorted(i for i in tokens.keys() - kept_ids if i <= last):
        if len(kept_ids) < limit and can_occur(tokenizer, spec, tokens[i]):
            _add_tokens(kept_ids, {i} | find_merges(i), limit)
    return np.array(sorted(kept_ids), np.int64)


def _add_tokens(kept_ids: set[int], ids: set[int], limit: int) -> list[int]:
    """Adds the tokens to `kept_ids` if `limit` leaves room for all of them; returns the tokens that are new."""
    new = ids - kept_ids
    if len(kept_ids) + len(new) > limit:
        return []
    kept_ids |= new
    return sorted(new)


def _find_last_unseen(counts: Int64[np.ndarray, "vocab"], needed: set[int], unseen: float) -> int:
    """Returns the highest id up to which unseen tokens are kept, -1 if none are."""
    if not unseen:
        return len(counts) - 1
    once = [i for i in np.flatnonzero(counts == 1).tolist() if i not in needed]
    share = len(once) / int(counts.sum())
    return once[math.ceil((1 - unseen / share) * len(once)) - 1] if share > unseen else -1


def _check_counts(counts: Int64[np.ndarray, "vocab"], coverage: float, unseen: float, size: int) -> None:
    if not 0 < coverage <= 1:
        raise CompressError(f"coverage: expected a share above 0 and up to 1, found {coverage}: no vocabulary has it")
    if not 0 <= unseen <= 1:
        raise CompressError(f"unseen: expected a share from 0 to 1, found {unseen}: no vocabulary has it")
    if counts.shape != (size,):
        raise CompressError(
            f"counts: expected one for each of {size} ids, found {list(counts.shape)}: they belong to another tokenizer"
        )
    if not counts.any():
        raise CompressError("counts: expected uses of tokens, found none: every token would look unused")


def prune_vocabulary(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids: Ids
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Returns a model of the same class and a tokenizer, both reduced to the tokens `ids`.

    Texts without removed tokens give the same outputs; removed tokens are split into remaining ones. All weights with
    one row per token are sliced: input embeddings, the language-modelling head, whether tied or not, and its bias. The
    ids in config and generation_config are renumbered. Embedding rows beyond the tokenizer's vocabulary are removed.

    Args:
        model: The model to reduce; it isn't modified and shares no memory with the new one.
        tokenizer: The model's tokenizer; it isn't modified.
        ids: Ascending ids, as returned by `choose_tokens`.

    Raises:
        CompressError: As for `prune_tokenizer`; ids exceed the model's rows; a token id in the config isn't among
            `ids`; the padding id would change in a model that counts positions from it, such as RoBERTa.

    Source: keeping the tokens that a corpus uses as in Abdaoui et al. 2020, Load What You Need (arXiv 2010.05609); here
        the tokens that spelling needs stay regardless of their frequency, so that no text becomes [UNK].
    """
    pruned = prune_tokenizer(tokenizer, ids)
    kept_ids = torch.from_numpy(np.asarray(ids, np.int64))
    rows = len(get_token_embedding(model).weight)
    if kept_ids[-1] >= rows:
        raise CompressError(
            f"ids: expected ids below the model's {rows} rows, found {kept_ids[-1]}: the tokenizer belongs to another "
            "model"
        )
    remap = remap_ids(rows, kept_ids.numpy())
    _check_positions(model, remap)
    small = _build_empty_model(model, remap, len(kept_ids))
    shapes = {name: weight.shape for name, weight in small.state_dict().items()}
    small.load_state_dict(_slice_weights(model.state_dict(keep_vars=True), shapes, rows, kept_ids), assign=True)
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for name, parameter in small.named_parameters():
        parameter.requires_grad_(trained[name])
    small.to(model.device)  # type: ignore[arg-type]
    return small.train(model.training), pruned


def get_token_embedding(model: PreTrainedModel) -> nn.Embedding:
    """Returns the embedding of the model's input tokens.

    Raises:
        CompressError: It isn't an `nn.Embedding`.
    """
    table = model.get_input_embeddings()
    if not isinstance(table, nn.Embedding):
        raise CompressError(
            f"{type(model).__name__}: expected an nn.Embedding of its tokens, found {type(table).__name__}: it can't "
            "be sliced by token"
        )
    return table


def _check_positions(model: PreTrainedModel, remap: Int64[np.ndarray, "vocab"]) -> None:
    """Checks that the padding id is unchanged in models that count positions from it, such as RoBERTa."""
    for name, module in model.named_modules():
        pad = getattr(module, "padding_idx", None)
        if "position" in name and pad is not None and remap[pad] != pad:
            raise CompressError(
                f"padding id: expected it to stay {pad}, since {name} counts positions from it, found {remap[pad]}: "
                "every position would shift; keep all tokens below it"
            )


def _build_empty_model(model: PreTrainedModel, remap: Int64[np.ndarray, "vocab"], size: int) -> PreTrainedModel:
    """Returns a model of the class and config of `model` with `size` tokens and placeholder weights."""
    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    if getattr(text, "vocab_size", None) != len(remap):
        raise CompressError(
            f"config.vocab_size: expected the {len(remap)} rows of the embeddings, found "
            f"{getattr(text, 'vocab_size', None)}: the pruned model couldn't be described"
        )
    text.vocab_size = size
    _renumber_config(config, remap, "config")
    if text is not config:
        _renumber_config(text, remap, "text config")
    with torch.random.fork_rng(devices=[]):
        small = type(model)(config)
    pad = get_token_embedding(model).padding_idx
    get_token_embedding(small).padding_idx = None if pad is None or remap[pad] == REMOVED else int(remap[pad])
    if getattr(model, "generation_config", None) is not None:
        small.generation_config = copy.deepcopy(model.generation_config)
        _renumber_config(small.generation_config, remap, "generation_config")
    return small


def _renumber_config(
    config: PretrainedConfig | GenerationConfig, remap: Int64[np.ndarray, "vocab"], where: str
) -> None:
    """Replaces every token id in a config by its new id, in place."""

    def renumber(key: str, value: TokenIds) -> TokenIds:
        if isinstance(value, (list, tuple)):
            return [renumber(key, i) for i in value]
        if value is None or value < 0:  # some configs use -1 for None
            return value
        if value >= len(remap) or remap[value] == REMOVED:
            raise CompressError(
                f"{where}.{key}: expected the id of a kept token, found {value}: the model would wait for a token it "
                "lacks; add it to ids or set the entry to None"
            )
        return int(remap[value])

    def is_kept(i: int) -> bool:
        return 0 <= i < len(remap) and remap[i] != REMOVED

    for key, value in list(vars(config).items()):
        if not value and value != 0:
            continue
        if key.endswith(("_token_id", "_token_ids")):
            setattr(config, key, renumber(key, value))
        elif key in ("suppress_tokens", "begin_suppress_tokens"):
            setattr(config, key, renumber(key, [i for i in value if is_kept(i)]) or None)
        elif key == "bad_words_ids":  # a phrase with a removed token can't be generated
            setattr(config, key, renumber(key, [phrase for phrase in value if all(map(is_kept, phrase))]) or None)
        elif key in ("sequence_bias", "force_words_ids"):
            raise CompressError(f"{where}.{key}: expected None, found ids: they would select other tokens")


def _slice_weights(
    weights: dict[str, Tensor], shapes: dict[str, torch.Size], rows: int, kept_ids: Int64[Tensor, "kept"]
) -> dict[str, Tensor]:
    """Returns copies of the weights with only the kept coordinates of vocabulary dimensions; tied weights stay tied."""
    copies: dict[int, Tensor] = {}
    for name, weight in weights.items():
        if id(weight) in copies:
            continue
        if weight.dim() != len(shapes[name]):
            raise CompressError(f"{name}: expected shape {list(shapes[name])}, found {list(weight.shape)}")
        small = weight.detach()
        for dim, (old, new) in enumerate(zip(weight.shape, shapes[name], strict=True)):
            if old != new:
                if (old, new) != (rows, len(kept_ids)):
                    raise CompressError(
                        f"{name}: expected {rows} tokens in dimension {dim}, found {old}: it would be sliced wrongly"
                    )
                small = small.index_select(dim, kept_ids.to(small.device))
        small = small.clone()
        copies[id(weight)] = nn.Parameter(small) if isinstance(weight, nn.Parameter) else small
    return {name: copies[id(weight)] for name, weight in weights.items()}
