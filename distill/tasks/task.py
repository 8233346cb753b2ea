"""What every task has: its models, its rows, its metric and its score."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torchmetrics import Metric
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from distill.checkpoint.config import load_config
from distill.checkpoint.weights import check_weights, describe_missing_head, load_model, read_report
from distill.data.config import DataConfig
from distill.data.splits.labelled import Examples, Splits
from distill.errors import InputError
from distill.tasks.baseline import Baseline
from distill.tasks.logit_rows import Answers

# Pre-trained bodies come with one of these; any other head was trained for another task.
BODIES = ("Model", "ForMaskedLM", "ForPreTraining", "LMHeadModel", "ForCausalLM")


class Scorer(Protocol):
    """Collects what a model says of a split, batch by batch."""

    def update(self, rows: np.ndarray, batch: dict[str, Tensor], logits: Tensor) -> None:
        """Logits of the rows with these numbers in the split."""

    def scores(self) -> dict[str, float]:
        """The task's metric first."""

    def decisions(self) -> np.ndarray:
        """What the model decided, in an order that doesn't depend on the batches, to be compared with another's."""


@dataclass(frozen=True)
class Task(ABC):
    """A task with its labels in the order of the logits, none where it has none.

    Args:
        labels: Their names.
    """

    labels: tuple[str, ...]
    name: ClassVar[str]
    head: ClassVar[str]  # of stock classes, such as ForTokenClassification
    heads: ClassVar[tuple[str, ...]]  # all that classes with one end in
    metric_name: ClassVar[str]
    problem: ClassVar[str | None] = None  # what stock configs call it
    answers: ClassVar[Answers] = Answers()
    form: ClassVar[Any] = Examples  # of a split: its `table`, and `of` to read that back
    kept: ClassVar[str] = "logits"  # what a cache keeps of the teacher's logits where nothing else is asked for
    keeps_width: ClassVar[bool] = False  # whether a student must answer in vectors as wide as the teacher's
    at_once: ClassVar[int] = 32  # rows that are scored together

    def __init_subclass__(cls) -> None:
        if "head" in cls.__dict__ and "heads" not in cls.__dict__:
            cls.heads = (cls.head,)

    @classmethod
    @abstractmethod
    def read(cls, config: DataConfig, seed: int) -> Splits:
        """The data of `config` in this task's form."""

    @classmethod
    @abstractmethod
    def read_bare(cls, config: DataConfig) -> Any:
        """Every training row, held out later or not, and the unlabelled ones, without labels: what a teacher is asked
        about.
        """

    @abstractmethod
    def encode(self, tokenizer: PreTrainedTokenizerBase, part: Any, max_length: int) -> Any:
        """A split as token ids: `Rows`."""

    def encode_train(self, tokenizer: PreTrainedTokenizerBase, part: Any, max_length: int) -> Any:
        """A split as rows to train on."""
        return self.encode(tokenizer, part, max_length)

    def longest(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> int:
        """Most tokens of a row that `encode` makes."""
        return min(max_length, tokenizer.model_max_length)

    @classmethod
    def of(cls, labels: Sequence[str], how: Mapping[str, Any]) -> Self:
        """The task with these labels, and what a run's settings say of it; see `how_of`."""
        return cls(tuple(labels))

    @abstractmethod
    def metric(self) -> Metric:
        """`update(logits [rows, classes], labels [rows])`; higher is better."""

    @abstractmethod
    def scorer(self, rows: Any) -> Scorer:
        """Of an encoded split."""

    def baseline(self, train: Any) -> Baseline | None:
        """The one answer for all rows that a split to train on suggests; None where that tells nothing."""
        return None

    @property
    def auto(self) -> Any:
        """The class that loads its checkpoints."""
        return getattr(transformers, f"AutoModel{self.head}")

    @classmethod
    def check(cls, config: PretrainedConfig, path: str) -> None:
        """
        Raises:
            InputError: The checkpoint was trained for another task.
        """
        check_head(config, path, cls.head, cls.name)

    def settle(self, config: PretrainedConfig, folder: Path) -> None:  # noqa: B027
        """Completes the config of a checkpoint in `folder`, where stock classes would do otherwise than its tokenizer.

        Raises:
            InputError: A tokenizer that the task can't be done with.
        """

    def whole(self, folder: Path, *, new_head: bool = False) -> PreTrainedModel:
        """The checkpoint as it came, with its head of the task's; a `new_head` where it has none."""
        model = load_model(self.auto, folder, new_head=new_head)
        self.settle(model.config, folder)
        return model

    def check_weights(self, folder: Path, role: str, *, new_head: bool = False, finite: bool = True) -> None:
        """Checks a checkpoint before anything is computed with it.

        Args:
            folder: The checkpoint.
            role: What it is to the command, for errors.
            new_head: Whether it may come without a head of this task, which is then trained.
            finite: Whether its weights are read, too.

        Raises:
            InputError: The files don't hold the weights of the model that the config describes.
        """
        check_weights(self.auto, folder, role, new_head=new_head, finite=finite)

    def missing_head(self, folder: Path) -> str:
        """Empty where the files have weights of the head that the config names; else what is there instead."""
        report = read_report(self.auto, folder)
        return describe_missing_head(report) if report is not None and report.head_absent else ""

    def settle_tokenizer(self, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:  # noqa: B027
        """Gives the tokenizer of a checkpoint in `folder` what else is known of how it is used, for all who load it."""

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:  # noqa: B027
        """
        Raises:
            InputError: A tokenizer that the task can't be done with.
        """

    def config(self, path: str) -> PretrainedConfig:
        """Reads a checkpoint's config and gives it this task's labels.

        Raises:
            InputError: The checkpoint was trained for another task.
        """
        config: Any = load_config(Path(path))
        self.check(config, path)
        if self.labels:
            config.num_labels = len(self.labels)
            config.id2label = dict(enumerate(self.labels))
            config.label2id = {name: i for i, name in enumerate(self.labels)}
        if self.problem is not None:
            config.problem_type = self.problem
        self.settle(config, Path(path))
        return config

    def load(self, path: str, seed: int) -> PreTrainedModel:
        """Loads a body with a new head for these labels, initialised from `seed`."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return load_model(self.auto, path, new_head=True, config=self.config(path), dtype=torch.float32)

    def head_rows(self, config: PretrainedConfig) -> list[int] | None:
        """Row of the checkpoint's head for each of our labels, matched by name; None when some label has no row."""
        if not any(name.endswith(self.head) for name in config.architectures or []):
            return None
        row = {plain(name): int(i) for i, name in (config.id2label or {}).items()}
        rows = [row.get(plain(name)) for name in self.labels]
        return None if any(i is None for i in rows) else [i for i in rows if i is not None]

    def load_headed(self, path: str, rows: Sequence[int]) -> PreTrainedModel:
        """Loads a checkpoint with its head, the rows put into the order of our labels."""
        model = load_model(self.auto, path, dtype=torch.float32)
        self.settle(model.config, Path(path))
        if not self.labels:
            return model
        layer = output_layer(model)
        keep = torch.tensor(rows)
        layer.weight = nn.Parameter(layer.weight.detach()[keep].clone())
        if layer.bias is not None:
            layer.bias = nn.Parameter(layer.bias.detach()[keep].clone())
        layer.out_features = len(rows)
        model.num_labels = len(rows)
        model.config.id2label = dict(enumerate(self.labels))
        model.config.label2id = {name: i for i, name in enumerate(self.labels)}
        return model


def check_head(config: PretrainedConfig, path: str, head: str, task: str) -> None:
    """
    Raises:
        InputError: A checkpoint that was trained for another task.
    """
    for name in config.architectures or []:
        if not name.endswith((head, *BODIES)):
            raise InputError(
                f"model {path!r}: expected a model for {task} or a pre-trained body, found {name}: "
                "it was trained for another task, and its outputs have another meaning"
            )


def output_layer(model: PreTrainedModel) -> nn.Linear:
    """The linear layer that gives the logits: the last one whose width is the number of labels."""
    found = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features == model.config.num_labels]
    if not found:
        raise InputError(
            f"{type(model).__name__}: no linear layer with {model.config.num_labels} outputs for its labels"
        )
    return found[-1]


def plain(label: str) -> str:
    """A label's name; `LABEL_3`, which transformers writes for a class without one, is the class named `3`."""
    return label.removeprefix("LABEL_")
