"""Batches of the shapes that a training sees, and the teacher's signals for them, as fake tensors."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig

from distill.checkpoint.sentence_form import vector_width
from distill.data.batches.encode import Batch
from distill.data.batches.segments import ROW_MASK
from distill.losses.teacher_signals import TeacherSignals
from distill.models.attention import read_attention_widths
from distill.tasks.language import Language, MaskedLM
from distill.tasks.question_answering import QuestionAnswering
from distill.tasks.task import Task
from distill.tasks.text_classification import MultiLabel, Regression
from distill.tasks.token_classification import TokenClassification
from pipelines.planner.fake_process_group import count_selected
from pipelines.settings.commands.cache import KeepConfig
from pipelines.stages.cache.signals import parse_layers


@dataclass(frozen=True)
class BatchShape:
    """Size of a batch on one process.

    Args:
        rows: Number of rows.
        row_length: Tokens of each, with padding.
        share: Share of the tokens at which a language model predicts.
        segments: Number of processes that the tokens of each row are divided among.
    """

    rows: int
    row_length: int
    share: float = 1.0
    segments: int = 1

    @property
    def length(self) -> int:
        """Number of tokens of each row on the process."""
        return -(-self.row_length // self.segments)

    @property
    def positions(self) -> int:
        """Number of tokens at which a language model predicts."""
        return count_selected(self.rows * self.length, self.share)


def build_fake_batch(task: type[Task], shape: BatchShape, labels: int) -> Batch:
    """Returns a batch of a task with this number of labels; every token is attended to."""
    ids = torch.ones(shape.rows, shape.length, dtype=torch.long)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if shape.segments > 1:
        row_mask = torch.ones(shape.rows, shape.segments * shape.length, dtype=torch.long)
        batch |= {ROW_MASK: row_mask, "position_ids": torch.zeros_like(ids)}
    by_row = torch.zeros(shape.rows, dtype=torch.long)
    if issubclass(task, MaskedLM):
        labels_of_positions = torch.ones(shape.positions, dtype=torch.long)
        return batch | {"positions": torch.ones_like(ids, dtype=torch.bool), "labels": labels_of_positions}
    if issubclass(task, Language | TokenClassification):
        return batch | {"labels": torch.zeros_like(ids)}
    if issubclass(task, QuestionAnswering):
        return batch | {"labels": by_row, "ends": by_row.clone()}
    if issubclass(task, MultiLabel):
        return batch | {"labels": torch.zeros(shape.rows, labels)}
    return batch | {"labels": by_row.float() if issubclass(task, Regression) else by_row}


def build_fake_signals(
    task: type[Task], shape: BatchShape, keep: KeepConfig, teacher: PretrainedConfig
) -> TeacherSignals:
    """Returns the signals that a cache with these settings has for a batch.

    Args:
        task: The task.
        shape: Size of the batch.
        keep: Which signals are stored, from `choose_signals`.
        teacher: The teacher's config.
    """
    signals = TeacherSignals()
    for name in keep.signals.split(","):
        signals |= build_fake_signal(name, task, shape, keep, teacher)
    return signals


def build_fake_signal(
    name: str, task: type[Task], shape: BatchShape, keep: KeepConfig, teacher: PretrainedConfig
) -> TeacherSignals:
    """Returns one signal, under the names that losses read."""
    rows, length, width = shape.rows, shape.length, int(teacher.hidden_size)
    if name == "sampled":
        ids = torch.zeros(shape.positions, keep.draws, dtype=torch.long)
        return TeacherSignals(ids=ids, weights=torch.ones(ids.shape), temperature=keep.temperature or 1.0)
    if name == "topk":
        ids = torch.zeros(shape.positions, keep.k, dtype=torch.long)
        tail = torch.zeros(shape.positions)
        return TeacherSignals(ids=ids, log_probs=torch.zeros(ids.shape), tail=tail, temperature=keep.temperature or 1.0)
    if name == "hidden":
        layers = parse_layers(keep.layers, teacher.num_hidden_layers)
        return TeacherSignals(hidden={layer: torch.zeros(rows, length, width) for layer in layers})
    if name == "relations":
        layers = parse_layers(keep.vectors or keep.layers, teacher.num_hidden_layers - 1)
        widths = read_attention_widths(teacher)
        return TeacherSignals(relations={layer: build_fake_vectors(rows, length, widths) for layer in layers})
    if name == "embedding":
        return TeacherSignals(embedding=torch.zeros(rows, vector_width(teacher)))
    return TeacherSignals(logits=build_fake_logits(task, shape, teacher))


def build_fake_vectors(rows: int, length: int, widths: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries, keys and values of a layer."""
    queries, keys, values = (torch.zeros(rows, length, width) for width in widths)
    return queries, keys, values


def build_fake_logits(task: type[Task], shape: BatchShape, teacher: PretrainedConfig) -> Tensor:
    """Returns logits in the form in which the teacher's are read."""
    if issubclass(task, Language):
        return torch.zeros(shape.positions, int(teacher.vocab_size))
    if issubclass(task, TokenClassification | QuestionAnswering):
        return torch.zeros(shape.rows, shape.length, int(teacher.num_labels or 2))
    return torch.zeros(shape.rows, int(teacher.num_labels or 1))
