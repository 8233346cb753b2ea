"""A static student as one vector for each token: the direction of their mean is that of the student's text vector.

The student divides the weighted sum of its vectors by the sum of the weights; model2vec and Sentence Transformers
divide by the number of tokens. With the weights multiplied into the vectors the sums are the same, and so are vectors
of length 1.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import normalize
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.errors import ExportError
from distill.checkpoint.custom_models import has_token_vectors

TEXTS_PER_BATCH = 64


@torch.no_grad()
def build_static_table(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> np.ndarray:
    """Returns the vector of each of the tokenizer's tokens, times its weight, float32 [tokens, width].

    Args:
        model: A static student.
        tokenizer: Its tokenizer.
        name: Of the format, for messages.

    Raises:
        ExportError: The mean of such vectors isn't what the student computes.
    """
    conflict = find_static_conflict(model, tokenizer)
    if conflict:
        raise ExportError(f"{name}: expected {conflict}: a mean of vectors of tokens would be another vector")
    vectors: Any = model.base_model
    weighted: Tensor = vectors.words.weight * vectors.importance.weight[: len(vectors.words.weight)].exp()
    table: np.ndarray = weighted[: len(tokenizer)].float().numpy()
    return table


def find_static_conflict(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns what is expected of a model whose text vectors are means of tokens' vectors, and what was found instead.

    Empty if the model is as expected.
    """
    config = model.config
    if not has_token_vectors(model) or config.encoder != "static":
        return f"a static student, found a {getattr(config, 'encoder', type(model).__name__)}"
    if config.pooling != ["weighted"] or config.ngram_buckets or config.pair:
        found = f"pooling={'+'.join(config.pooling)}" + f", ngrams={config.ngram_buckets}" * bool(config.ngram_buckets)
        found += ", of two texts" * bool(config.pair)
        return f"pooling=weighted without ngrams, of one text, found {found}"
    vectors: Any = model.base_model
    weights = vectors.importance.weight[tokenizer.all_special_ids].exp()
    if weights.any():
        return "weights of 0 for special tokens, which the library leaves out, found others; train the student again"
    if not tokenizer.is_fast or len(tokenizer) > len(vectors.words.weight):
        return f"a tokenizer of the tokenizers library with a vector for each token, found {type(tokenizer).__name__}"
    return ""


def copy_backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """Returns the tokenizer of the tokenizers library, without limit and padding."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    return backend


@torch.no_grad()
def compute_text_vectors(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]
) -> np.ndarray:
    """Returns a static student's vectors of whole texts, of length 1 [texts, width]."""
    parts = []
    for start in range(0, len(texts), TEXTS_PER_BATCH):
        rows = list(texts[start : start + TEXTS_PER_BATCH])
        batch = tokenizer(rows, padding=True, truncation=False, return_tensors="pt")
        pooled = model.base_model(batch["input_ids"], batch["attention_mask"]).pooler_output
        parts.append(normalize(pooled.float(), dim=-1).numpy())
    return np.concatenate(parts)
