"""Students without attention: vectors of tokens from the teacher, alone, with convolutions or with recurrent layers."""

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from distill.checkpoint.custom_models.modeling_token_vectors import (
    TokenVectorsConfig,
    TokenVectorsForSequenceClassification,
    TokenVectorsForTokenClassification,
    TokenVectorsSentenceModel,
)
from distill.data.batches.encode import split_special_tokens
from distill.errors import InputError
from distill.models.sentence_encoder import PooledModel, get_stock_body
from distill.student.spec import DEFAULT_POOLING, StudentSpec

VECTOR_HEADS = {
    "ForSequenceClassification": TokenVectorsForSequenceClassification,
    "ForTokenClassification": TokenVectorsForTokenClassification,
}
ENCODER_LAYERS = {"static": 0, "cnn": 3, "gru": 1}
TOKENS_AT_ONCE = 512  # tokens that the teacher reads at a time
RARE = 1e-4  # share below which a token has nearly its full weight
LEFT_OUT = -1e4  # logarithm of a weight that is exactly 0, and has no gradient
VERSION = 2  # of how these students are built; bump it when the same teacher gives another student (docs/stages.md)


def token_vectors_config(teacher: PretrainedConfig, parsed: StudentSpec, *, pair: bool = False) -> TokenVectorsConfig:
    """Returns the config of a student without attention.

    Args:
        teacher: The teacher's config.
        parsed: The student's spec.
        pair: The rows have two texts, which are pooled apart.

    Raises:
        InputError: A size is not possible.
    """
    register_vector_heads()
    encoder = parsed.preset
    requested = {key: numbers[0] for key, numbers in parsed.requested.items()}
    check_vector_sizes(parsed, requested)
    width = requested.get("embeddings", min(256, teacher.hidden_size))
    return TokenVectorsConfig(
        vocab_size=teacher.vocab_size,
        encoder=encoder,
        embedding_size=width,
        hidden_size=requested.get("hidden", 256),
        encoder_layers=requested.get("layers", ENCODER_LAYERS[encoder]),
        pooling=parsed.pooling or DEFAULT_POOLING[encoder],
        kernel_size=requested.get("kernel", 3),
        ngram_buckets=requested.get("ngrams", 0),
        order_positions=requested.get("positions", 32),
        pair=pair,
        pad_token_id=teacher.pad_token_id,
        max_position_embeddings=getattr(teacher, "max_position_embeddings", None),
        id2label=teacher.id2label,
        label2id=teacher.label2id,
        problem_type=teacher.problem_type,
    )


def register_vector_heads() -> None:
    """Registers the classes with transformers' auto classes, which build a model from its config alone in a dry run."""
    for head, model in VECTOR_HEADS.items():
        getattr(transformers, f"AutoModel{head}").register(TokenVectorsConfig, model, exist_ok=True)


def check_pair_tokenizer(parsed: StudentSpec, tokenizer: PreTrainedTokenizerBase) -> None:
    """Checks that the tokenizer tells the two texts of a pair apart.

    Raises:
        InputError: It has no token types.
    """
    if "token_type_ids" not in tokenizer.model_input_names:
        raise InputError(
            f"student {parsed.preset}: expected a tokenizer with token_type_ids for pairs of texts, found "
            f"{type(tokenizer).__name__} without: the two texts couldn't be told apart; take a student with attention, "
            "such as layers=2"
        )


def check_vector_sizes(parsed: StudentSpec, requested: dict[str, int]) -> None:
    """Checks the sizes of a student without attention.

    Raises:
        InputError: A size is below 1, or has no meaning for this kind of student.
    """
    encoder = parsed.preset
    for key, size in requested.items():
        if size < 1:
            raise InputError(f"student {key}={size}: expected at least 1")
    meaningless = {"static": ("layers", "kernel"), "cnn": ("ngrams",), "gru": ("ngrams", "kernel")}[encoder]
    for key in meaningless:
        if key in requested:
            raise InputError(f"student {parsed.text!r}: {key} has no meaning for a {encoder} student; leave it out")
    if "positions" in requested and "order" not in parsed.pooling:
        raise InputError(
            f"student {parsed.text!r}: expected pooling=order with positions, found another pooling: only order keeps "
            "positions apart"
        )
    if "ngrams" in requested and "order" in parsed.pooling:
        raise InputError(
            f"student {parsed.text!r}: expected ngrams or pooling=order, found both: pairs of tokens come after "
            "the padding of a batch, so they have no position; use pooling=mean+max with ngrams"
        )
    if encoder == "gru" and requested.get("hidden", 2) % 2:
        raise InputError(f"student hidden={requested['hidden']}: expected an even number, half for each direction")


def build_token_vectors(
    teacher: PreTrainedModel,
    parsed: StudentSpec,
    tokenizer: PreTrainedTokenizerBase | None,
    seed: int = 0,
    *,
    pair: bool = False,
) -> PreTrainedModel:
    """Builds a student without attention, whose table holds what the teacher makes of each token alone.

    Each token is read by the teacher between the tokenizer's special tokens, and the mean of the last layer is its
    vector. The principal components of these vectors become the table, and frequent tokens get small weights (in the
    order of the vocabulary, by Zipf's law): as a weight of their own for `pooling=weighted`, otherwise as the length of
    the vector. The layers and the head are random from `seed`, and so is the whole table of a `fresh` student. The
    weights that a static student has with `pooling=weighted` are 0 for special tokens and stay 0; other kinds of
    pooling count them.

    Args:
        teacher: A classifier, a tagger or a sentence encoder.
        parsed: The student's spec.
        tokenizer: The teacher's.
        seed: Of the random weights.
        pair: See `token_vectors_config`.

    Raises:
        InputError: There is no such student for the teacher's task, a size is not possible, or the tokenizer doesn't
            tell the texts of a pair apart.

    Source: van Dongen & Tulkens 2024, Model2Vec; the weights are those of Arora et al. 2017 (A Simple but Tough-to-Beat
    Baseline for Sentence Embeddings, section 3). There the table is used as it is; here it is trained.
    """
    head = choose_vector_head(teacher, parsed.preset)
    if pair and tokenizer is not None:
        check_pair_tokenizer(parsed, tokenizer)
    config = token_vectors_config(teacher.config, parsed, pair=pair)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        student: PreTrainedModel = head(config)
    if not parsed.fresh:
        if tokenizer is None:
            raise InputError(f"student {parsed.preset}: expected the teacher's tokenizer, found none")
        fill_table(student.base_model, compute_token_vectors(teacher, tokenizer))
    if tokenizer is not None:
        leave_out_special_tokens(student.base_model, tokenizer)
    return student


def choose_vector_head(teacher: PreTrainedModel, encoder: str) -> type[PreTrainedModel]:
    """Returns the class of a student without attention that does what the teacher does.

    Raises:
        InputError: There is none.
    """
    if isinstance(teacher, PooledModel):
        return TokenVectorsSentenceModel
    head = next((each for name, each in VECTOR_HEADS.items() if type(teacher).__name__.endswith(name)), None)
    if head is None or (head is TokenVectorsForTokenClassification and encoder == "static"):
        tags = "" if encoder == "static" else ", tags tokens"
        raise InputError(
            f"student {encoder}: expected a teacher that classifies texts{tags} or encodes sentences, found "
            f"{type(teacher).__name__}"
        )
    return head


def leave_out_special_tokens(vectors: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Sets the weights of special tokens, and of unknown ones, to 0 where a static student has weights of tokens.

    Without words of their own they would only dilute a mean, and libraries of static vectors leave them out.
    """
    if vectors.config.encoder == "static" and vectors.importance is not None:
        with torch.no_grad():
            vectors.importance.weight[tokenizer.all_special_ids] = LEFT_OUT


def fill_table(vectors: Any, token_vectors: Tensor) -> None:
    """Sets the table of a student, and the weights of its tokens, from vectors [tokens, width]."""
    importance = weigh_by_frequency(len(token_vectors))
    table = reduce_width(token_vectors, vectors.config.embedding_size)
    with torch.no_grad():
        weighted = vectors.config.encoder == "static" and vectors.importance is not None
        vectors.words.weight.copy_(table if weighted else table * importance[:, None])
        if vectors.config.ngram_buckets:
            vectors.ngrams.weight.zero_()
        if weighted:
            vectors.importance.weight.zero_()
            vectors.importance.weight[: len(token_vectors), 0] = importance.log()


@torch.no_grad()
def compute_token_vectors(teacher: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Returns the mean of the teacher's last layer over each token alone between special tokens, [tokens, width]."""
    body: Any = get_stock_body(teacher).base_model
    size = teacher.config.vocab_size
    before, after = (torch.tensor(ids, dtype=torch.long) for ids in split_special_tokens(tokenizer))
    means = []
    for ids in torch.arange(size).split(TOKENS_AT_ONCE):
        rows = torch.cat([before.expand(len(ids), -1), ids[:, None], after.expand(len(ids), -1)], 1).to(teacher.device)
        states = body(input_ids=rows, attention_mask=torch.ones_like(rows)).last_hidden_state
        means.append(states.mean(1).float().cpu())
    return torch.cat(means)


def reduce_width(vectors: Tensor, width: int) -> Tensor:
    """Returns the principal components of vectors [rows, features] as [rows, width], scaled to a mean square of 1."""
    centred = (vectors - vectors.mean(0)).double()
    _, directions = torch.linalg.eigh(centred.T @ centred)
    reduced = centred @ directions.flip(1)[:, :width]
    reduced = reduced / reduced.square().mean().sqrt()
    if width > reduced.shape[1]:
        reduced = torch.cat([reduced, reduced.new_zeros(len(reduced), width - reduced.shape[1])], 1)
    result: Tensor = reduced.float()
    return result


def weigh_by_frequency(count: int) -> Tensor:
    """Returns the weight of each token of a vocabulary in the order of frequency, [count] in (0, 1)."""
    shares = 1 / (torch.arange(count, dtype=torch.float64) + 2)
    shares /= shares.sum()
    weights: Tensor = RARE / (RARE + shares)
    return weights.float()
