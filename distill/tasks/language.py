"""Language modelling: causal, masked, and on conversations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from distill.data.batches.encode import IGNORED
from distill.data.batches.packing import PackedRows, text_documents
from distill.data.batches.token_blocks import LanguageBlocks, token_blocks
from distill.data.config import DataConfig
from distill.data.masking.config import MaskConfig
from distill.data.masking.masks import MaskedBlocks
from distill.data.rows.chat import TargetBlocks, encode_chats
from distill.data.rows.chat_config import ChatConfig
from distill.data.rows.chat_template import read_file
from distill.data.rows.conversations import Conversations, load_bare_conversations, load_conversations
from distill.data.rows.documents import load_bare_documents, load_documents
from distill.data.splits.labelled import Examples, Splits
from distill.errors import InputError
from distill.tasks.scorer import RowAccuracy, Scorer
from distill.tasks.task import Task


@dataclass(frozen=True)
class Language(Task):
    """Language modelling on rows of at most `max_length` tokens, with vocabulary logits at each position.

    Args:
        packing: `stream`, `documents` or `none`, see `DataConfig`.
    """

    packing: str = "stream"
    metric_name: ClassVar[str] = "token accuracy"
    kept: ClassVar[str] = "sampled"
    at_once: ClassVar[int] = 4  # the logits of a row take tens of megabytes

    @classmethod
    def read(cls, config: DataConfig, seed: int) -> Splits:
        return load_documents(config, seed)

    @classmethod
    def read_unlabelled(cls, config: DataConfig) -> Examples:
        return load_bare_documents(config)

    def longest(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> int:
        return max_length  # a tokenizer's own limit often belongs to another model

    def rows(self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], max_length: int) -> LanguageBlocks:
        if self.packing == "stream":
            return LanguageBlocks(token_blocks(tokenizer, texts, max_length))
        return text_documents(tokenizer, texts, max_length)

    def encode_train(self, tokenizer: PreTrainedTokenizerBase, part: Any, max_length: int) -> Any:
        rows = self.encode(tokenizer, part, max_length)
        return PackedRows.build(rows, max_length) if self.packing == "documents" else rows

    def scorer(self, rows: Any = None) -> Scorer:
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
                "new head would have to learn every word anew"
            )

    @classmethod
    def has_head(cls, config: PretrainedConfig) -> bool:
        return any(name.endswith(cls.heads) for name in config.architectures or [])

    def head_rows(self, config: PretrainedConfig) -> list[int] | None:
        return []


@dataclass(frozen=True)
class CausalLM(Language):
    """Causal language modelling: each token is predicted from those before it."""

    name: ClassVar[str] = "causal-lm"
    head: ClassVar[str] = "ForCausalLM"
    heads: ClassVar[tuple[str, ...]] = ("ForCausalLM", "LMHeadModel")

    @classmethod
    def build(cls, labels: Sequence[str], how: Mapping[str, Any]) -> Self:
        return cls(tuple(labels), how.get("packing", "stream"))

    def encode(self, tokenizer: PreTrainedTokenizerBase, part: Any, max_length: int) -> Any:
        return self.rows(tokenizer, part.texts, max_length)


@dataclass(frozen=True)
class Chatting(CausalLM):
    """Causal language modelling of the assistant's turns in conversations, or of completions of prompts.

    Args:
        chat: Which parts of the conversations are training targets.
    """

    name: ClassVar[str] = "chat"
    form: ClassVar[Any] = Conversations
    packing: str = "documents"
    chat: ChatConfig = field(default_factory=ChatConfig)

    @classmethod
    def build(cls, labels: Sequence[str], how: Mapping[str, Any]) -> Self:
        return cls(tuple(labels), how.get("packing", "documents"), ChatConfig(**how.get("chat", {})))

    @classmethod
    def read(cls, config: DataConfig, seed: int) -> Splits:
        return load_conversations(config, seed)

    @classmethod
    def read_unlabelled(cls, config: DataConfig) -> Any:
        return load_bare_conversations(config)

    def longest(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> int:
        return min(max_length, tokenizer.model_max_length)

    def settle_tokenizer(self, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
        if self.chat.template is not None:
            tokenizer.chat_template = read_file(self.chat.template)

    def encode(self, tokenizer: PreTrainedTokenizerBase, part: Conversations, max_length: int) -> TargetBlocks:
        return encode_chats(tokenizer, part.texts, max_length, self.chat)


@dataclass(frozen=True)
class MaskedLM(Language):
    """Masked language modelling: masked tokens are predicted from those around them.

    Args:
        masking: Which tokens are masked; validation and test use the masks of the first epoch.
    """

    name: ClassVar[str] = "masked-lm"
    head: ClassVar[str] = "ForMaskedLM"
    heads: ClassVar[tuple[str, ...]] = ("ForMaskedLM", "ForPreTraining")
    masking: MaskConfig = field(default_factory=MaskConfig)

    @classmethod
    def build(cls, labels: Sequence[str], how: Mapping[str, Any]) -> Self:
        return cls(tuple(labels), how.get("packing", "stream"), MaskConfig(**how.get("masking", {})))

    def encode(self, tokenizer: PreTrainedTokenizerBase, part: Examples, max_length: int) -> MaskedBlocks:
        return MaskedBlocks.build(self.rows(tokenizer, part.texts, max_length), self.masking, tokenizer)

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        MaskedBlocks.build(LanguageBlocks([]), self.masking, tokenizer)


class TokenScorer(RowAccuracy):
    """Share of the labelled tokens that the model ranks first, and the perplexity: exp of the mean cross-entropy."""

    def __init__(self, rows: int = 0):
        super().__init__()
        self.predictions: list[np.ndarray] = [np.zeros(0, np.int64)] * rows
        self.nats = 0.0

    def record(self, rows: np.ndarray, batch: dict[str, Tensor], logits: Tensor) -> None:
        labelled = batch["labels"] != IGNORED
        labels, found = batch["labels"][labelled], logits[labelled].float()
        self.update(found, labels)
        self.nats += F.cross_entropy(found, labels, reduction="sum").item()
        for row, own in zip(rows, found.argmax(-1).split(labelled.sum(1).tolist()), strict=True):
            self.predictions[row] = own.numpy()

    def scores(self) -> dict[str, float]:
        perplexity = float(np.exp(self.nats / max(1, int(self.total))))
        return {"token accuracy": self.accuracy(), "perplexity": perplexity}

    def decisions(self) -> np.ndarray:
        return np.concatenate(self.predictions)
