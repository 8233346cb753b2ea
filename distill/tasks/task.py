"""The base class of tasks: loading of models, encoding of rows, training metric and scores."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, cast

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from distill.checkpoint.auto_class import AutoClass
from distill.checkpoint.config import load_config
from distill.checkpoint.load_report import describe_missing_head
from distill.checkpoint.weights import check_weights, load_model, read_report
from distill.data.config import DataConfig
from distill.data.splits.examples import Examples, Splits
from distill.errors import InputError
from distill.tasks.baseline import Baseline
from distill.tasks.logit_rows import OutputRows
from distill.tasks.scorer import Scorer

Problem = Literal["single_label_classification", "multi_label_classification", "regression"]
# Class name suffixes of pre-trained bodies; any other head was trained for another task.
BODIES = ("Model", "ForMaskedLM", "ForPreTraining", "LMHeadModel", "ForCausalLM")


@dataclass(frozen=True)
class Task(ABC):
    """A task and its labels.

    Args:
        labels: Names of the labels in the order of the logits; empty for a task without labels.
    """

    labels: tuple[str, ...]
    name: ClassVar[str]
    head: ClassVar[str]  # suffix of the stock classes, such as ForTokenClassification
    heads: ClassVar[tuple[str, ...]]  # all suffixes of stock classes with such a head
    metric_name: ClassVar[str]
    problem: ClassVar[Problem | None] = None  # `problem_type` in stock configs
    output_rows: ClassVar[OutputRows] = OutputRows()  # conversion of a batch's logits and labels to rows
    split_class: ClassVar[Any] = Examples  # class of a split, with `table` and, to restore it, `from_table`
    needs_teacher_width: ClassVar[bool] = False  # whether the student's output vectors must be as wide as the teacher's
    eval_batch_size: ClassVar[int] = 32  # rows scored per batch

    def __init_subclass__(cls) -> None:
        if "head" in cls.__dict__ and "heads" not in cls.__dict__:
            cls.heads = (cls.head,)

    @classmethod
    @abstractmethod
    def read(cls, config: DataConfig, seed: int) -> Splits:
        """Loads the splits of the dataset of `config`, as instances of `split_class`."""

    @classmethod
    @abstractmethod
    def read_unlabelled(cls, config: DataConfig) -> Any:
        """Loads the rows to query a teacher with, all without labels.

        They are all training rows, including those held out later, and the unlabelled rows.
        """

    @abstractmethod
    def encode(self, tokenizer: PreTrainedTokenizerBase, part: Any, max_length: int) -> Any:
        """Returns a split as token ids (`EncodedRows`)."""

    def encode_train(self, tokenizer: PreTrainedTokenizerBase, part: Any, max_length: int) -> Any:
        """Returns a split as rows to train on."""
        return self.encode(tokenizer, part, max_length)

    def max_row_length(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> int:
        """Returns the maximum number of tokens in a row of `encode`."""
        return min(max_length, tokenizer.model_max_length)

    @classmethod
    def build(cls, labels: Sequence[str], settings: Mapping[str, Any]) -> Self:
        """Returns the task with these labels and the task settings of a run; see `pipelines.settings.task_settings`."""
        return cls(tuple(labels))

    @abstractmethod
    def scorer(self, rows: Any = None) -> Scorer:
        """Returns the task's scorer, for validation during training or, with `rows`, for evaluation on a split.

        Args:
            rows: The encoded split whose samples are passed to `Scorer.record`.
        """

    def baseline(self, train: Any) -> Baseline | None:
        """Returns the best constant prediction according to the training split; None where there is none."""
        return None

    @property
    def auto(self) -> AutoClass:
        """The auto class that loads checkpoints of this task."""
        return cast(AutoClass, getattr(transformers, f"AutoModel{self.head}"))

    @classmethod
    def check(cls, config: PretrainedConfig, path: str) -> None:
        """Checks that the checkpoint at `path` fits this task.

        Raises:
            InputError: The checkpoint was trained for another task.
        """
        check_head(config, path, cls.head, cls.name)

    def complete_config(self, config: PretrainedConfig, folder: Path) -> None:  # noqa: B027
        """Completes the config of a checkpoint in `folder` where stock classes would disagree with its tokenizer.

        Raises:
            InputError: The tokenizer can't be used for this task.
        """

    def load_checkpoint(self, folder: Path, *, new_head: bool = False) -> PreTrainedModel:
        """Loads the checkpoint unchanged, with its head for this task.

        With `new_head` a missing head is initialized.
        """
        model: PreTrainedModel = load_model(self.auto, folder, new_head=new_head)
        self.complete_config(model.config, folder)
        return model

    def check_weights(self, folder: Path, role: str, *, new_head: bool = False, finite: bool = True) -> None:
        """Checks a checkpoint before anything is computed with it.

        Args:
            folder: The checkpoint.
            role: Role of the checkpoint in the command, for error messages.
            new_head: Whether the checkpoint may lack a head for this task, which is then trained.
            finite: Whether to also read the weights and check that they are finite.

        Raises:
            InputError: The files don't contain the weights of the model that the config describes.
        """
        check_weights(self.auto, folder, role, new_head=new_head, finite=finite)

    def describe_head(self) -> str:
        """Describes the head that a model of the task needs."""
        listed = f"the data's {len(self.labels)} labels ({', '.join(self.labels[:4])}, …)"
        return f"a head for {listed if self.labels else self.name}"

    def missing_head(self, folder: Path) -> str:
        """Describes what the files contain if they lack the weights of the config's head; otherwise empty."""
        report = read_report(self.auto, folder)
        return describe_missing_head(report) if report is not None and report.head_absent else ""

    def configure_tokenizer(self, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:  # noqa: B027
        """Applies the task's settings and those stored in `folder` to the tokenizer; used wherever it is loaded."""

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:  # noqa: B027
        """Checks that the task can use the tokenizer.

        Raises:
            InputError: The tokenizer can't be used for this task.
        """

    def config(self, path: str) -> PretrainedConfig:
        """Reads a checkpoint's config and sets this task's labels in it.

        Raises:
            InputError: The checkpoint was trained for another task.
        """
        config = load_config(Path(path))
        self.check(config, path)
        if self.labels:
            config.num_labels = len(self.labels)
            config.id2label = dict(enumerate(self.labels))
            config.label2id = {name: i for i, name in enumerate(self.labels)}
        if self.problem is not None:
            config.problem_type = self.problem
        self.complete_config(config, Path(path))
        return config

    def load(self, path: str, seed: int) -> PreTrainedModel:
        """Loads a checkpoint for these labels; a head that its files lack is new, initialized from `seed`."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            config = self.config(path)
            model: PreTrainedModel = load_model(self.auto, path, new_head=True, config=config, dtype=torch.float32)
            return model

    def head_rows(self, config: PretrainedConfig) -> list[int] | None:
        """Returns the row of the checkpoint's head for each label of the task, matched by name.

        None if the checkpoint has another head, or a label has no row.
        """
        if not any(name.endswith(self.head) for name in config.architectures or []):
            return None
        row = {label_name(name): int(i) for i, name in (config.id2label or {}).items()}
        rows = [row.get(label_name(name)) for name in self.labels]
        return None if any(i is None for i in rows) else [i for i in rows if i is not None]

    def find_head(self, folder: Path, config: PretrainedConfig) -> tuple[list[int] | None, str]:
        """Returns `head_rows`, and None if the head's weights are missing, with `missing_head`'s description."""
        rows = self.head_rows(config)
        missing = self.missing_head(folder) if rows is not None else ""
        return None if missing else rows, missing

    def load_to_train(self, folder: Path, config: PretrainedConfig, seed: int) -> PreTrainedModel:
        """Loads a checkpoint with its head if that has the labels and weights, otherwise with a new one."""
        rows, _ = self.find_head(folder, config)
        return self.load(str(folder), seed) if rows is None else self.load_with_head(str(folder), rows)

    def load_with_head(self, path: str, rows: Sequence[int]) -> PreTrainedModel:
        """Loads a checkpoint with its head, whose rows are reordered to match the task's labels."""
        model: PreTrainedModel = load_model(self.auto, path, dtype=torch.float32)
        self.complete_config(model.config, Path(path))
        if not self.labels:
            return model
        layer = output_layer(model)
        keep = torch.tensor(rows)
        layer.weight = nn.Parameter(layer.weight.detach()[keep].clone())
        if layer.bias is not None:
            layer.bias = nn.Parameter(layer.bias.detach()[keep].clone())
        layer.out_features = len(rows)
        model.num_labels = len(rows)  # type: ignore[assignment]
        model.config.id2label = dict(enumerate(self.labels))
        model.config.label2id = {name: i for i, name in enumerate(self.labels)}
        return model


def check_head(config: PretrainedConfig, path: str, head: str, task: str) -> None:
    """Checks that a checkpoint has a head of the class name suffix `head`, or is a pre-trained body.

    Raises:
        InputError: The checkpoint was trained for another task.
    """
    for name in config.architectures or []:
        if not name.endswith((head, *BODIES)):
            raise InputError(
                f"model {path!r}: expected a model for {task} or a pre-trained body, found {name}: "
                "it was trained for another task, and its outputs have another meaning"
            )


def output_layer(model: PreTrainedModel) -> nn.Linear:
    """Returns the linear layer that outputs the logits: the last one whose width is the number of labels."""
    layers = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features == model.config.num_labels]
    if not layers:
        raise InputError(
            f"{type(model).__name__}: expected a linear layer with {model.config.num_labels} outputs, one for each "
            "label, found none"
        )
    return layers[-1]


def label_name(label: str) -> str:
    """Returns a label's name without the prefix of `LABEL_3`, which transformers writes for an unnamed class."""
    return label.removeprefix("LABEL_")
