"""A model's outputs on a split, their score, and the divergence of students from them."""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from distill.checkpoint.outputs import find_logits
from distill.data.batches.batches import EncodedRows, EvalBatches, length_order
from distill.data.batches.encode import Batch
from distill.data.rows.windows import Windows
from distill.errors import InputError
from distill.eval_mode import eval_mode
from distill.losses.teacher_signals import TeacherSignals
from distill.models.inputs import build_inputs
from distill.models.output_head import restrict_logits
from distill.tasks.logit_rows import split_by_row
from distill.tasks.names import LANGUAGE_TASKS
from distill.tasks.task import Task

TOP_K = 64  # number of logits stored of a vocabulary; all of them would take gigabytes


@dataclass(frozen=True)
class SplitOutputs:
    """A model's outputs on a split.

    Args:
        samples: Signals of each sample by name, in the form that caches have: [1, ...] or [queried positions, ...].
        score: Score by the task's training metric; higher is better.
        sample_keys: Identity of each sample, see `list_sample_keys`.
        temperature: Temperature that softened the distributions before they were truncated to TOP_K tokens; None for
            complete distributions.
    """

    samples: list[dict[str, Tensor]]
    score: float
    sample_keys: list[Hashable]
    temperature: float | None = None

    def select(self, rows: list[int]) -> TeacherSignals:
        """Returns the concatenated signals of some samples."""
        settings = TeacherSignals(temperature=self.temperature) if self.temperature else TeacherSignals()
        tensors = {name: torch.cat([self.samples[i][name] for i in rows]) for name in self.samples[rows[0]]}
        return cast(TeacherSignals, tensors) | settings


@torch.no_grad()
def compute_outputs(
    model: PreTrainedModel, split: EncodedRows, pad_id: int, task: Task, temperature: float = 1.0
) -> SplitOutputs:
    """Computes the model's outputs on a split; the model is left in eval mode."""
    model.eval()
    batches, metric = EvalBatches(split, 2 * task.eval_batch_size, pad_id), task.scorer()
    is_language_model = task.name in LANGUAGE_TASKS
    samples: list[dict[str, Tensor]] = [{} for _ in range(len(split))]
    for rows, batch in zip(batches.order, batches, strict=True):
        logits = compute_logits(model, batch)
        metric.update(task.output_rows.logits(batch, logits), task.output_rows.labels(batch))
        for row, row_logits in zip(rows, split_by_row(batch, {"logits": logits})["logits"], strict=True):
            samples[row] = top_log_probs(row_logits / temperature) if is_language_model else {"logits": row_logits}
    score = float(metric.compute())
    return SplitOutputs(samples, score, list_sample_keys(split), temperature if is_language_model else None)


def list_sample_keys(split: EncodedRows) -> list[Hashable]:
    """Returns keys that identify a split's samples independently of the tokenizer.

    The key of a sample is its index. For a window on a context, which tokenizers split differently, it is the
    question's index and the first and last character of every token.
    """
    if not isinstance(split, Windows):
        return list(range(len(split)))
    windows = zip(split.owners.tolist(), split.offsets, split.allowed, strict=True)
    return [(owner, offsets[allowed].tobytes()) for owner, offsets, allowed in windows]


def compute_logits(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Returns a batch's logits on the CPU; of a language model those at the queried positions, [rows, tokens]."""
    on_device = {name: value.to(model.device) if isinstance(value, Tensor) else value for name, value in batch.items()}
    with restrict_logits(model, on_device):
        logits = find_logits(model(**build_inputs(model, on_device)))
    assert logits is not None
    return logits.cpu()


def top_log_probs(logits: Tensor) -> dict[str, Tensor]:
    """Returns `ids` and `log_probs` [rows, TOP_K] of the likeliest tokens, and the `tail` [rows], the others' total."""
    top = torch.log_softmax(logits.float(), -1).topk(min(TOP_K, logits.shape[-1]))
    tail = (1 - top.values.exp().sum(-1)).clamp(min=0)
    return {"ids": top.indices, "log_probs": top.values, "tail": tail}


@dataclass(frozen=True)
class TeacherComparison:
    """Compares students with the teacher on a split.

    Args:
        task: Defines the rows of a batch.
        split: The split, encoded for the students.
        pad_id: The students' padding id.
        teacher: The teacher's outputs on the same split, in its order.
        temperature: The temperature of the loss.
        limit: The largest number of samples to compare, evenly spaced over the split; None: all.
    """

    task: Task
    split: EncodedRows
    pad_id: int
    teacher: SplitOutputs
    temperature: float = 1.0
    limit: int | None = None

    def __len__(self) -> int:
        """Returns the number of samples that are compared."""
        return len(self.samples)

    @torch.no_grad()
    def divergence(self, student: PreTrainedModel) -> float:
        """Returns the mean distance between student and teacher over the rows of the samples.

        The distance is the KL divergence in nats at the temperature, for numbers the squared difference, and for
        vectors 2 - 2 cosine. Windows that the student's tokenizer splits differently are left out, as are samples
        with a row per token whose number of tokens differs.

        Raises:
            InputError: No sample is left.
        """
        total, count = 0.0, 0
        with eval_mode(student):
            for order in length_order(self.split.lengths[self.samples], 2 * self.task.eval_batch_size):
                rows = self.samples[order].tolist()
                batch = self.split.collate(rows, self.pad_id)
                student_logits = split_by_row(batch, {"logits": compute_logits(student, batch)})["logits"]
                comparable = [i for i, row in enumerate(rows) if len(student_logits[i]) == self.count_rows(row)]
                if comparable:
                    part, logits = (
                        {name: value[comparable] for name, value in batch.items()},
                        [student_logits[i] for i in comparable],
                    )
                    teacher = [self.teacher_samples[rows[i]] for i in comparable]
                    distance, size = self.compare(part, torch.cat(logits), teacher)
                    total, count = total + distance * size, count + size
        if not count:
            raise InputError(
                f"validation: expected samples that student and teacher tokenize into the same rows, found none of "
                f"{len(self.split)}: students can't be compared; keep all tokens with --prune.vocabulary false"
            )
        return total / count

    @cached_property
    def samples(self) -> np.ndarray:
        """Indices of the samples that are compared."""
        return np.linspace(0, len(self.split) - 1, min(len(self.split), self.limit or len(self.split)), dtype=np.int64)

    @cached_property
    def teacher_samples(self) -> dict[int, int]:
        """Index of the teacher's sample for each of the student's samples that the teacher was evaluated on too."""
        numbers = {key: number for number, key in enumerate(self.teacher.sample_keys)}
        return {row: numbers[key] for row, key in enumerate(list_sample_keys(self.split)) if key in numbers}

    def count_rows(self, row: int) -> int:
        """Returns the number of rows in the teacher's outputs for a sample; 0 if there are none."""
        number = self.teacher_samples.get(row)
        return 0 if number is None else len(next(iter(self.teacher.samples[number].values())))

    def compare(self, batch: Batch, logits: Tensor, teacher_rows: list[int]) -> tuple[float, int]:
        """Returns (mean distance, number of rows) of samples."""
        output_rows = self.task.output_rows
        student = output_rows.logits(batch, logits)
        teacher = output_rows.signals(batch, self.teacher.select(teacher_rows))
        return float(output_rows.distance(student, teacher, output_rows.labels(batch), self.temperature)), len(student)
