"""A transformers model that looks vectors of tokens up in a table and combines them without attention.

Stillroom ships this file beside the weights of such models. It needs torch and transformers only. `config.encoder` says
what comes after the table:

    static  nothing; with `ngram_buckets` the table has a vector for each hash of two neighboring tokens, too
    cnn     residual convolutions over neighboring tokens
    gru     gated recurrent layers, in both directions

`config.pooling` lists how the vectors of a text become one; the results of several are concatenated:

    mean      their mean
    weighted  their mean with a learned weight for each token (of a cnn or gru: each position, from its vector)
    max       the maximum of each feature
    order     the sum over the first `order_positions` tokens, each position with learned scales of all features

With `config.pair` the two texts of a row are pooled apart, and their difference and product are features too.
"""

# mypy: ignore-errors

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling, SequenceClassifierOutput, TokenClassifierOutput
from transformers.utils import ModelOutput

MULTIPLIER = 1_000_003  # of the first id in the hash of two; prime


class TokenVectorsConfig(PreTrainedConfig):
    """Sizes and choices of the model; see the top of this file."""

    model_type = "token_vectors"

    def __init__(
        self,
        vocab_size=30522,
        encoder="static",
        embedding_size=256,
        hidden_size=256,
        encoder_layers=0,
        pooling=("mean",),
        kernel_size=3,
        ngram_buckets=0,
        order_positions=32,
        pair=False,
        hidden_dropout_prob=0.1,
        initializer_range=0.02,
        pad_token_id=0,
        **more,
    ):
        self.vocab_size, self.encoder = vocab_size, encoder
        self.embedding_size, self.hidden_size, self.encoder_layers = embedding_size, hidden_size, encoder_layers
        self.pooling, self.kernel_size, self.ngram_buckets = list(pooling), kernel_size, ngram_buckets
        self.order_positions, self.pair = order_positions, pair
        self.hidden_dropout_prob, self.initializer_range = hidden_dropout_prob, initializer_range
        super().__init__(pad_token_id=pad_token_id, **more)

    @property
    def num_hidden_layers(self):
        """Layers of the encoder."""
        return self.encoder_layers

    @property
    def num_attention_heads(self):
        """0: the model has no attention."""
        return 0

    @property
    def type_vocab_size(self):
        """Types of tokens that the model reads: those of the two texts of a pair."""
        return 2 if self.pair else 1

    @property
    def features(self):
        """Width of a token's vector after the encoder."""
        return self.embedding_size if self.encoder == "static" else self.hidden_size

    @property
    def pooled_features(self):
        """Width of a row's vector."""
        return self.features * len(self.pooling) * (4 if self.pair else 1)


class Convolutions(nn.Module):
    """Residual convolutions: [rows, length, embedding_size] to [rows, length, hidden_size]."""

    def __init__(self, config):
        super().__init__()
        self.widen = nn.Linear(config.embedding_size, config.hidden_size)
        self.layers = nn.ModuleList(
            nn.Conv1d(config.hidden_size, config.hidden_size, config.kernel_size, padding="same")
            for _ in range(config.encoder_layers)
        )
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, vectors, mask):
        hidden = self.widen(vectors).transpose(1, 2)
        counted = mask.transpose(1, 2)
        for layer in self.layers:
            hidden = hidden + self.dropout(torch.relu(layer(hidden * counted)))
        return hidden.transpose(1, 2)


class Recurrences(nn.Module):
    """Gated recurrent layers in both directions: [rows, length, embedding_size] to [rows, length, hidden_size].

    The other direction reads each row's own tokens in reverse, so that its state never starts with padding.
    """

    def __init__(self, config):
        super().__init__()
        half, widths = config.hidden_size // 2, [config.embedding_size]
        widths += [config.hidden_size] * (config.encoder_layers - 1)
        self.forwards = nn.ModuleList(nn.GRU(width, half, batch_first=True) for width in widths)
        self.backwards = nn.ModuleList(nn.GRU(width, half, batch_first=True) for width in widths)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, vectors, mask):
        length = vectors.shape[1]
        places = torch.arange(length, device=vectors.device).unsqueeze(0)
        last = mask.sum((1, 2)).long().unsqueeze(1) - 1
        reverse = torch.where(places <= last, last - places, places).unsqueeze(-1)
        hidden = vectors
        for i, (forwards, backwards) in enumerate(zip(self.forwards, self.backwards, strict=True)):
            given = self.dropout(hidden) if i else hidden
            backward, _ = backwards(given.gather(1, reverse.expand(-1, -1, given.shape[-1])))
            backward = backward.gather(1, reverse.expand(-1, -1, backward.shape[-1]))
            hidden = torch.cat([forwards(given)[0], backward], -1)
        return hidden


ENCODERS = {"cnn": Convolutions, "gru": Recurrences}


class Pooling(nn.Module):
    """The vectors of a text as one: [rows, length, features] to [rows, features x kinds of pooling]."""

    def __init__(self, config):
        super().__init__()
        self.kinds, self.positions = tuple(config.pooling), config.order_positions
        if "order" in self.kinds:
            self.scales = nn.Parameter(torch.randn(config.order_positions, config.features) / config.order_positions)

    def forward(self, vectors, mask, weights):
        found = []
        for kind in self.kinds:
            if kind == "max":
                found.append(vectors.masked_fill(mask == 0, -1e4).amax(1))
            elif kind == "order":
                first = (vectors * mask)[:, : self.positions]
                found.append((first * self.scales[: first.shape[1]]).sum(1))
            else:
                share = mask if kind == "mean" else mask * weights
                found.append((vectors * share).sum(1) / share.sum(1).clamp(min=1e-6))
        return torch.cat(found, -1)


class TokenVectorsPreTrainedModel(PreTrainedModel):
    """Loading and saving of the models of this file."""

    config_class = TokenVectorsConfig
    base_model_prefix = "vectors"
    main_input_name = "input_ids"

    def _init_weights(self, module):
        if isinstance(module, nn.Embedding):
            super()._init_weights(module)
        elif module is not self and hasattr(module, "reset_parameters"):
            module.reset_parameters()


class TokenVectorsModel(TokenVectorsPreTrainedModel):
    """The table, the encoder and the pooling."""

    def __init__(self, config):
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, config.embedding_size, padding_idx=config.pad_token_id)
        self.ngrams = nn.Embedding(config.ngram_buckets, config.embedding_size) if config.ngram_buckets else None
        self.layers = ENCODERS[config.encoder](config) if config.encoder in ENCODERS else None
        self.importance = None
        if "weighted" in config.pooling:
            is_static = config.encoder == "static"
            entries = config.vocab_size + config.ngram_buckets
            self.importance = nn.Embedding(entries, 1) if is_static else nn.Linear(config.hidden_size, 1)
        self.pooling = Pooling(config)
        self.post_init()

    def get_input_embeddings(self):
        return self.words

    def set_input_embeddings(self, value):
        self.words = value

    def forward(self, input_ids, attention_mask=None, token_type_ids=None, **unused):
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        vectors, ids = self.words(input_ids), input_ids
        counted = mask.unsqueeze(-1).to(vectors.dtype)
        if self.layers is not None:
            vectors = self.layers(vectors, counted)
        hidden = vectors
        if self.ngrams is not None:
            hashed = hash_pairs(input_ids, self.config.ngram_buckets)
            ids = torch.cat([ids, hashed + self.config.vocab_size], 1)
            vectors = torch.cat([vectors, self.ngrams(hashed)], 1)
            counted = torch.cat([counted, counted[:, 1:] * counted[:, :-1]], 1)
        weights = None
        if self.importance is not None:
            weights = torch.exp(self.importance(vectors if self.layers is not None else ids))
        if not self.config.pair:
            pooled = self.pooling(vectors, counted, weights)
        else:
            pooled = self.pool_pair(vectors, counted, weights, token_type_ids)
        return BaseModelOutputWithPooling(last_hidden_state=hidden, pooler_output=pooled)

    def pool_pair(self, vectors, counted, weights, token_type_ids):
        """Features of two texts [rows, features x kinds of pooling x 4]."""
        types = torch.zeros_like(counted[..., 0]) if token_type_ids is None else token_type_ids.to(counted.dtype)
        second = types.unsqueeze(-1)
        if self.ngrams is not None:
            second = torch.cat([second, second[:, 1:]], 1)
        one, two = (self.pooling(vectors, counted * each, weights) for each in (1 - second, second))
        return torch.cat([one, two, (one - two).abs(), one * two], -1)


def hash_pairs(ids, buckets):
    """A bucket for each two neighboring ids [rows, length - 1]."""
    return (ids[:, :-1] * MULTIPLIER + ids[:, 1:]) % buckets


@dataclass
class TextVectorsOutput(ModelOutput):
    """Vectors of texts [rows, width], called logits as the results of the other models are."""

    logits: torch.Tensor | None = None


class TokenVectorsSentenceModel(TokenVectorsPreTrainedModel):
    """A sentence encoder: a text's vector of length 1."""

    def __init__(self, config):
        super().__init__(config)
        self.vectors = TokenVectorsModel(config)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, token_type_ids=None, **unused):
        pooled = self.vectors(input_ids, attention_mask, token_type_ids).pooler_output
        return TextVectorsOutput(logits=nn.functional.normalize(pooled, dim=-1))


class TokenVectorsForSequenceClassification(TokenVectorsPreTrainedModel):
    """A classifier of texts or of pairs of texts, with one hidden layer."""

    def __init__(self, config):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.vectors = TokenVectorsModel(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.dense = nn.Linear(config.pooled_features, config.hidden_size)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, token_type_ids=None, **unused):
        pooled = self.vectors(input_ids, attention_mask, token_type_ids).pooler_output
        hidden = torch.relu(self.dense(self.dropout(pooled)))
        return SequenceClassifierOutput(logits=self.classifier(self.dropout(hidden)))


class TokenVectorsForTokenClassification(TokenVectorsPreTrainedModel):
    """A tagger of tokens."""

    def __init__(self, config):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.vectors = TokenVectorsModel(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(config.features, config.num_labels)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, token_type_ids=None, **unused):
        hidden = self.vectors(input_ids, attention_mask, token_type_ids).last_hidden_state
        return TokenClassifierOutput(logits=self.classifier(self.dropout(hidden)))


TokenVectorsConfig.register_for_auto_class()
TokenVectorsModel.register_for_auto_class("AutoModel")
TokenVectorsSentenceModel.register_for_auto_class("AutoModel")
TokenVectorsForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
TokenVectorsForTokenClassification.register_for_auto_class("AutoModelForTokenClassification")
