"""Language modelling: causal, masked, and on conversations."""

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from distill.data.batches.batches import EncodedRows
from distill.data.batches.encode import TokenRows
from distill.data.batches.packing import PackedRows, text_documents
from distill.data.batches.token_blocks import LanguageBlocks, token_blocks
from distill.data.config import DataConfig, Packing
from distill.data.masking.config import MaskConfig
from distill.data.masking.masks import MaskedBlocks
from distill.data.rows.chat import TargetBlocks, encode_chats
from distill.data.rows.chat_config import ChatConfig
from distill.data.rows.chat_template import read_template_file
from distill.data.rows.conversations import Conversations, load_all_conversations, load_conversations
from distill.data.rows.documents import load_all_documents, load_documents
from distill.data.sources.stored_texts import StoredTexts
from distill.data.splits.examples import Examples, Splits
from distill.data.stored.rows import StreamBlocks, TextRows
from distill.data.stored.tokens import StoredTokens
from distill.errors import InputError
from distill.losses.logits import IGNORED
from distill.tasks.names import LANGUAGE_HEADS
from distill.tasks.scorer import RowAccuracy, Scorer
from distill.tasks.task import Task


@dataclass(frozen=True)
class Language(Task):
    """Language modelling on rows of at most `max_length` tokens, with vocabulary logits at each position.

    Args:
        packing: `stream`, `documents` or `none`, see `DataConfig`.
    """

    packing: Packing = "stream"
    metric_name: ClassVar[str] = "token accuracy"
    eval_batch_size: ClassVar[int] = 4  # the logits of a row take tens of megabytes

    @classmethod
    def read(cls, config: DataConfig, seed: int) -> Splits:
        """Loads documents; see `load_documents`."""
        return load_documents(config, seed)

    @classmethod
    def read_unlabelled(cls, config: DataConfig) -> Examples:
        """Loads every training document."""
        return load_all_documents(config)

    def max_row_length(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> int:
        """Returns `max_length`, as a tokenizer's own limit often belongs to another model."""
        return max_length

    def encode_texts(
        self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str] | StoredTokens, max_length: int
    ) -> LanguageBlocks:
        """Returns the texts as blocks of one stream, or as separate documents, depending on the packing."""
        if isinstance(texts, StoredTokens):
            if self.packing == "stream":
                return LanguageBlocks(StreamBlocks.build(texts, tokenizer, max_length))
            rows = TextRows.build(texts, tokenizer, max_length)
            return LanguageBlocks(rows, counted=rows.counted)
        if isinstance(texts, StoredTexts):
            texts = texts.load()
        if self.packing == "stream":
            return LanguageBlocks(token_blocks(tokenizer, texts, max_length))
        return text_documents(tokenizer, texts, max_length)

    def encode_train(self, tokenizer: PreTrainedTokenizerBase, part: Any, max_length: int) -> EncodedRows:
        """Returns a split as rows to train on, packed if the packing is `documents`."""
        rows: EncodedRows = self.encode(tokenizer, part, max_length)
        return PackedRows.build(rows, max_length) if self.packing == "documents" else rows

    def scorer(self, rows: Sized | None = None) -> Scorer:
        """Returns the scorer of tokens."""
        return TokenScorer(0 if rows is None else len(rows))

    @classmethod
    def check(cls, config: PretrainedConfig, path: str) -> None:
        """Checks that the checkpoint has a language-modelling head.

        Raises:
            InputError: The checkpoint has no language-modelling head; a new one would have to be trained from scratch.
        """
        if not cls.has_head(config):
            found = config.architectures or ["no architecture"]
            raise InputError(
                f"model {path!r}: expected a head for {cls.name} ({', '.join(cls.heads)}), found {', '.join(found)}: a "
                "new head would have to learn every token from scratch"
            )

    @classmethod
    def has_head(cls, config: PretrainedConfig) -> bool:
        """Returns whether the checkpoint has a language-modelling head for this task."""
        return any(name.endswith(cls.heads) for name in config.architectures or [])

    def head_rows(self, config: PretrainedConfig) -> list[int] | None:
        """Returns no rows, as the head is used unchanged."""
        return []


@dataclass(frozen=True)
class CausalLM(Language):
    """Causal language modelling: each token is predicted from those before it."""

    name: ClassVar[str] = "causal-lm"
    head: ClassVar[str] = "ForCausalLM"
    heads: ClassVar[tuple[str, ...]] = LANGUAGE_HEADS["causal-lm"]

    @classmethod
    def build(cls, labels: Sequence[str], settings: Mapping[str, Any]) -> Self:
        """Returns the task with the packing in `settings`."""
        return cls(tuple(labels), settings.get("packing", "stream"))

    def encode(self, tokenizer: PreTrainedTokenizerBase, part: Any, max_length: int) -> TokenRows:
        """Returns the texts of a split as token ids, whose labels are the next tokens."""
        return self.encode_texts(tokenizer, part.texts, max_length)


@dataclass(frozen=True)
class ChatTask(CausalLM):
    """Causal language modelling of the assistant's turns in conversations, or of completions of prompts.

    Args:
        chat: Which parts of the conversations are training targets.
    """

    name: ClassVar[str] = "chat"
    split_class: ClassVar[type[Conversations]] = Conversations
    packing: Packing = "documents"
    chat: ChatConfig = field(default_factory=ChatConfig)

    @classmethod
    def build(cls, labels: Sequence[str], settings: Mapping[str, Any]) -> Self:
        """Returns the task with the packing and the chat settings in `settings`."""
        return cls(tuple(labels), settings.get("packing", "documents"), ChatConfig(**settings.get("chat", {})))

    @classmethod
    def read(cls, config: DataConfig, seed: int) -> Splits:
        """Loads conversations; see `load_conversations`."""
        return load_conversations(config, seed)

    @classmethod
    def read_unlabelled(cls, config: DataConfig) -> Any:
        """Loads every training conversation."""
        return load_all_conversations(config)

    def max_row_length(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> int:
        """Returns the smaller of `max_length` and the tokenizer's own limit."""
        return min(max_length, tokenizer.model_max_length)

    def configure_tokenizer(self, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
        """Replaces the tokenizer's chat template by the one in the settings, if any."""
        if self.chat.template is not None:
            tokenizer.chat_template = read_template_file(self.chat.template)

    def encode(self, tokenizer: PreTrainedTokenizerBase, part: Conversations, max_length: int) -> TargetBlocks:
        """Returns conversations as token ids, of which the assistant's are targets; see `encode_chats`."""
        return encode_chats(tokenizer, part.texts, max_length, self.chat)


@dataclass(frozen=True)
class MaskedLM(Language):
    """Masked language modelling: masked tokens are predicted from those around them.

    Args:
        masking: Which tokens are masked; validation and test use the masks of the first epoch.
    """

    name: ClassVar[str] = "masked-lm"
    head: ClassVar[str] = "ForMaskedLM"
    heads: ClassVar[tuple[str, ...]] = LANGUAGE_HEADS["masked-lm"]
    masking: MaskConfig = field(default_factory=MaskConfig)

    @classmethod
    def build(cls, labels: Sequence[str], settings: Mapping[str, Any]) -> Self:
        """Returns the task with the packing and the masks in `settings`."""
        return cls(tuple(labels), settings.get("packing", "stream"), MaskConfig(**settings.get("masking", {})))

    def encode(self, tokenizer: PreTrainedTokenizerBase, part: Any, max_length: int) -> MaskedBlocks:
        """Returns the texts of a split as token ids, whose batches are masked."""
        return MaskedBlocks.build(self.encode_texts(tokenizer, part.texts, max_length), self.masking, tokenizer)

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Checks that the tokenizer has a mask token.

        Raises:
            InputError: It has none.
        """
        MaskedBlocks.build(LanguageBlocks([]), self.masking, tokenizer)


class TokenScorer(RowAccuracy):
    """Share of the labelled tokens that the model ranks first, and the perplexity: exp of the mean cross-entropy."""

    def __init__(self, rows: int = 0):
        super().__init__()
        self.predictions: list[np.ndarray] = [np.zeros(0, np.int64)] * rows
        self.nats = 0.0

    def record(self, rows: np.ndarray, batch: dict[str, Tensor], logits: Tensor) -> None:
        """Adds samples; logits [batch, length, vocabulary]."""
        labelled = batch["labels"] != IGNORED
        labels, predicted = batch["labels"][labelled], logits[labelled].float()
        self.update(predicted, labels)
        self.nats += F.cross_entropy(predicted, labels, reduction="sum").item()
        for row, tokens in zip(rows, predicted.argmax(-1).split(labelled.sum(1).tolist()), strict=True):
            self.predictions[row] = tokens.numpy()

    def scores(self) -> dict[str, float]:
        """Returns the token accuracy and the perplexity of the recorded samples."""
        perplexity = float(np.exp(self.nats / max(1, int(self.total))))
        return {"token accuracy": self.accuracy(), "perplexity": perplexity}

    def decisions(self) -> np.ndarray:
        """Returns the token ranked first at each labelled position."""
        return np.concatenate(self.predictions)
