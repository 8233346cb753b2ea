"""Vocabulary pruning: counting and choosing tokens, and slicing the model's weights along the vocabulary."""

import copy
import math
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from compress.errors import CompressError
from compress.prune.vocabulary.spelling import can_occur, names_of, parts_of, read_spec, special_words, spelling_words
from compress.prune.vocabulary.tokenizer import REMOVED, Ids, prune_tokenizer, remap_ids

TEXTS = 1000  # texts per tokenizer call
COVERAGE = 0.9999
UNSEEN = 0.001


def count_tokens(
    tokenizer: PreTrainedTokenizerBase, texts: Iterable[str] | Iterable[Sequence[str]]
) -> Int64[np.ndarray, "words"]:
    """Returns how often each id occurs in the texts, with special tokens added and without truncation.

    The texts are strings or sequences of words.

    Raises:
        CompressError: There are no texts, or `texts` is a single string.
    """
    if isinstance(texts, str):
        raise CompressError("texts: expected several strings, found one: its letters would be counted as texts")
    size = max(tokenizer.get_vocab().values()) + 1
    counts, left = np.zeros(size, np.int64), iter(texts)
    while batch := list(islice(left, TEXTS)):
        rows = tokenizer(
            batch,
            truncation=False,
            padding=False,
            return_attention_mask=False,
            verbose=False,
            is_split_into_words=not isinstance(batch[0], str),
        )
        counts += np.bincount(np.concatenate([np.asarray(row, np.int64) for row in rows["input_ids"]]), minlength=size)
    if not counts.any():
        raise CompressError("texts: expected a corpus, found nothing to count: every word would look unused")
    return counts


def choose_tokens(
    tokenizer: PreTrainedTokenizerBase,
    counts: Int64[np.ndarray, "words"],
    *,
    coverage: float = COVERAGE,
    unseen: float = UNSEEN,
    at_most: int | None = None,
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
            them; 0 keeps all of them (or as many as `at_most` allows), 1 none.
        at_most: Maximum number of tokens to keep; it takes precedence over `coverage` and `unseen`.

    Raises:
        CompressError: The tokenizer is slow; a share is out of range; counts belong to another vocabulary or are all 0;
            `at_most` is below the number of special tokens and tokens that spelling needs.

    Source: rate of unseen tokens by Good 1953, The Population Frequencies of Species and the Estimation of Population
        Parameters (Biometrika 40), N1 / N; that their ids are distributed as those of the tokens used once is our
        assumption.
    """
    spec = read_spec(tokenizer)
    names, parts = names_of(spec), parts_of(spec)
    check_counts(counts, coverage, unseen, max(names) + 1)
    needed = special_words(tokenizer, spec) | spelling_words(tokenizer, spec)
    limit = len(names) if at_most is None else at_most
    if limit < len(needed):
        raise CompressError(
            f"at_most: expected at least the {len(needed)} words of special tokens and spelling, found {limit}: texts "
            "could become [UNK]"
        )
    kept = set(needed)
    covered, wanted = int(counts[sorted(kept)].sum()), coverage * int(counts.sum())
    for word in np.argsort(-counts, kind="stable").tolist():
        if covered >= wanted or not counts[word]:
            break
        covered += int(counts[add(kept, {word} | parts(word), limit)].sum())
    last = last_unseen(counts, needed, unseen)
    for word in sorted(word for word in names.keys() - kept if word <= last):
        if len(kept) < limit and can_occur(tokenizer, spec, names[word]):
            add(kept, {word} | parts(word), limit)
    return np.array(sorted(kept), np.int64)


def add(kept: set[int], words: set[int], limit: int) -> list[int]:
    """Adds the tokens to `kept` if `limit` leaves room for all of them; returns the tokens that are new."""
    new = words - kept
    if len(kept) + len(new) > limit:
        return []
    kept |= new
    return sorted(new)


def last_unseen(counts: Int64[np.ndarray, "words"], needed: set[int], unseen: float) -> int:
    """Returns the highest id up to which unseen tokens are kept, -1 if none are."""
    if not unseen:
        return len(counts) - 1
    once = [i for i in np.flatnonzero(counts == 1).tolist() if i not in needed]
    share = len(once) / int(counts.sum())
    return once[math.ceil((1 - unseen / share) * len(once)) - 1] if share > unseen else -1


def check_counts(counts: Int64[np.ndarray, "words"], coverage: float, unseen: float, size: int) -> None:
    if not 0 < coverage <= 1:
        raise CompressError(f"coverage: expected a share above 0 and up to 1, found {coverage}: nothing can reach it")
    if not 0 <= unseen <= 1:
        raise CompressError(f"unseen: expected a share from 0 to 1, found {unseen}: no words can be chosen by it")
    if counts.shape != (size,):
        raise CompressError(
            f"counts: expected one for each of {size} ids, found {list(counts.shape)}: they are of another tokenizer"
        )
    if not counts.any():
        raise CompressError("counts: expected uses of words, found none: every word would look unused")


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
    kept = torch.from_numpy(np.asarray(ids, np.int64))
    rows = len(token_embedding(model).weight)
    if kept[-1] >= rows:
        raise CompressError(
            f"ids: expected ids below the model's {rows} rows, found {kept[-1]}: the tokenizer is another model's"
        )
    remap = remap_ids(rows, kept.numpy())
    check_positions(model, remap)
    small = empty_model(model, remap, len(kept))
    shapes = {name: weight.shape for name, weight in small.state_dict().items()}
    small.load_state_dict(sliced(model.state_dict(keep_vars=True), shapes, rows, kept), assign=True)
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for name, parameter in small.named_parameters():
        parameter.requires_grad_(trained[name])
    small.to(model.device)  # type: ignore[arg-type]
    return small.train(model.training), pruned


def token_embedding(model: PreTrainedModel) -> nn.Embedding:
    table = model.get_input_embeddings()
    if not isinstance(table, nn.Embedding):
        raise CompressError(
            f"{type(model).__name__}: expected an nn.Embedding for its words, found {type(table).__name__}: it can't "
            "be sliced by word"
        )
    return table


def check_positions(model: PreTrainedModel, remap: Int64[np.ndarray, "rows"]) -> None:
    """Checks that the padding id is unchanged in models that count positions from it, such as RoBERTa."""
    for name, module in model.named_modules():
        pad = getattr(module, "padding_idx", None)
        if "position" in name and pad is not None and remap[pad] != pad:
            raise CompressError(
                f"padding id: expected {pad} to keep its number, for {name} counts positions from it; it would become "
                f"{remap[pad]}: every position would shift; keep all words below it"
            )


def empty_model(model: PreTrainedModel, remap: Int64[np.ndarray, "rows"], words: int) -> PreTrainedModel:
    """Returns a model of the class and config of `model` with `words` tokens and placeholder weights."""
    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    if getattr(text, "vocab_size", None) != len(remap):
        raise CompressError(
            f"config.vocab_size: expected the {len(remap)} rows of the embeddings, found "
            f"{getattr(text, 'vocab_size', None)}: the pruned model couldn't be described"
        )
    text.vocab_size = words
    renumber(config, remap, "config")
    if text is not config:
        renumber(text, remap, "text config")
    with torch.random.fork_rng(devices=[]):
        small = type(model)(config)
    pad = token_embedding(model).padding_idx
    token_embedding(small).padding_idx = None if pad is None or remap[pad] == REMOVED else int(remap[pad])
    if getattr(model, "generation_config", None) is not None:
        small.generation_config = copy.deepcopy(model.generation_config)
        renumber(small.generation_config, remap, "generation_config")
    return small


def renumber(config: PretrainedConfig | Any, remap: Int64[np.ndarray, "rows"], where: str) -> None:
    """Replaces every token id in a config by its new id, in place."""

    def new(key: str, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [new(key, i) for i in value]
        if value is None or value < 0:  # some configs use -1 for None
            return value
        if value >= len(remap) or remap[value] == REMOVED:
            raise CompressError(
                f"{where}.{key}: expected an id that stays, found {value}: the model would wait for a word it lacks; "
                "add it to ids or set the entry to None"
            )
        return int(remap[value])

    def stays(i: int) -> bool:
        return 0 <= i < len(remap) and remap[i] != REMOVED

    for key, value in list(vars(config).items()):
        if not value and value != 0:
            continue
        if key.endswith(("_token_id", "_token_ids")):
            setattr(config, key, new(key, value))
        elif key in ("suppress_tokens", "begin_suppress_tokens"):
            setattr(config, key, new(key, [i for i in value if stays(i)]) or None)
        elif key == "bad_words_ids":  # a phrase with a removed token can't be generated
            setattr(config, key, new(key, [words for words in value if all(map(stays, words))]) or None)
        elif key in ("sequence_bias", "force_words_ids"):
            raise CompressError(f"{where}.{key}: expected None, found ids: they would stand for other words")


def sliced(
    weights: dict[str, Tensor], shapes: dict[str, torch.Size], rows: int, kept: Int64[Tensor, "kept"]
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
                if (old, new) != (rows, len(kept)):
                    raise CompressError(
                        f"{name}: expected {rows} words in dimension {dim}, found {old}: it would be sliced wrongly"
                    )
                small = small.index_select(dim, kept.to(small.device))
        small = small.clone()
        copies[id(weight)] = nn.Parameter(small) if isinstance(weight, nn.Parameter) else small
    return {name: copies[id(weight)] for name, weight in weights.items()}
