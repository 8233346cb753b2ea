"""One of several classes for a text or a pair of texts."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy
from transformers import AutoConfig, AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

from distill.errors import InputError

HEAD = "ForSequenceClassification"
# Pre-trained bodies come with one of these; any other head was trained for another task.
BODIES = ("Model", "ForMaskedLM", "ForPreTraining", "LMHeadModel", "ForCausalLM")


@dataclass(frozen=True)
class TextClassification:
    """The task with its classes in the order of the logits.

    Args:
        labels: Class names.
    """

    labels: tuple[str, ...]
    name: str = "text-classification"
    metric_name: str = "accuracy"

    def metric(self) -> Metric:
        """Accuracy over rows: `update(logits [rows, classes], labels [rows])`."""
        return MulticlassAccuracy(num_classes=len(self.labels), average="micro", ignore_index=-100)

    def score(self, logits: Tensor, labels: Tensor) -> float:
        """Share of rows whose largest logit is the label's; logits [rows, classes], labels [rows]."""
        return (logits.argmax(-1) == labels).double().mean().item()

    def config(self, path: str) -> PretrainedConfig:
        """Reads a checkpoint's config and gives it this task's labels.

        Raises:
            InputError: The checkpoint was trained for another task.
        """
        config = AutoConfig.from_pretrained(path)
        check_task(config, path)
        config.num_labels = len(self.labels)
        config.id2label = dict(enumerate(self.labels))
        config.label2id = {name: i for i, name in enumerate(self.labels)}
        config.problem_type = "single_label_classification"
        return config

    def load(self, path: str, seed: int) -> PreTrainedModel:
        """Loads a body with a new head for these labels, initialised from `seed`."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return AutoModelForSequenceClassification.from_pretrained(
                path, config=self.config(path), dtype=torch.float32, use_safetensors=True, ignore_mismatched_sizes=True
            )

    def head_rows(self, config: PretrainedConfig) -> list[int] | None:
        """Row of the checkpoint's head for each of our labels, matched by name; None when some label has no row."""
        if not any(name.endswith(HEAD) for name in config.architectures or []):
            return None
        row = {plain(name): int(i) for i, name in (config.id2label or {}).items()}
        rows = [row.get(plain(name)) for name in self.labels]
        return None if any(i is None for i in rows) else [i for i in rows if i is not None]

    def load_headed(self, path: str, rows: Sequence[int]) -> PreTrainedModel:
        """Loads a checkpoint with its head, the rows put into the order of our labels."""
        model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32, use_safetensors=True)
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


def check_task(config: PretrainedConfig, path: str) -> None:
    for name in config.architectures or []:
        if not name.endswith((HEAD, *BODIES)):
            raise InputError(
                f"model {path!r}: expected a text classifier or a pre-trained body, found {name}: "
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
