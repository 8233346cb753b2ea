"""A model's outputs on a split, their score, and the divergence of students from them."""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from distill.checkpoint.outputs import find_logits
from distill.data.batches.batches import EvalBatches, Rows
from distill.data.batches.encode import Batch
from distill.data.rows.questions import Windows
from distill.errors import InputError
from distill.losses.teacher_signals import TeacherSignals
from distill.models.inputs import build_inputs
from distill.models.output_head import restrict_logits
from distill.tasks.logit_rows import by_row
from distill.tasks.task import Task

TOP_K = 64  # number of logits stored of a vocabulary; all of them would take gigabytes


@dataclass(frozen=True)
class SplitOutputs:
    """A model's outputs on a split.

    Args:
        samples: Signals of each sample by name, in the form that caches have: [1, ...] or [queried positions, ...].
        score: Score by the task's training metric; higher is better.
        places: Identity of each sample, see `places_of`.
        temperature: Temperature that softened the distributions before they were truncated to KEPT tokens; None for
            complete distributions.
    """

    samples: list[dict[str, Tensor]]
    score: float
    places: list[Hashable]
    temperature: float | None = None

    def of(self, rows: list[int]) -> TeacherSignals:
        """Returns the concatenated signals of some samples."""
        facts = TeacherSignals(temperature=self.temperature) if self.temperature else TeacherSignals()
        tensors = {name: torch.cat([self.samples[i][name] for i in rows]) for name in self.samples[rows[0]]}
        return cast(TeacherSignals, tensors) | facts


@torch.no_grad()
def compute_outputs(
    model: PreTrainedModel, split: Rows, pad_id: int, task: Task, temperature: float = 1.0
) -> SplitOutputs:
    """Computes the model's outputs on a split; the model is left in eval mode."""
    model.eval()
    batches, metric = EvalBatches(split, 2 * task.at_once, pad_id), task.scorer()
    words = task.kept == "sampled"
    samples: list[dict[str, Tensor]] = [{} for _ in range(len(split))]
    for rows, batch in zip(batches.order, batches, strict=True):
        said = compute_logits(model, batch)
        metric.update(task.answers.logits(batch, said), task.answers.labels(batch))
        for row, own in zip(rows, by_row(batch, {"logits": said})["logits"], strict=True):
            samples[row] = top_log_probs(own / temperature) if words else {"logits": own}
    return SplitOutputs(samples, float(metric.compute()), places_of(split), temperature if words else None)


def places_of(split: Rows) -> list[Hashable]:
    """Returns keys that identify a split's samples independently of the tokenizer.

    The key of a sample is its index. For a window on a context, which tokenizers split differently, it is the
    question's index and the first and last character of every token.
    """
    if not isinstance(split, Windows):
        return list(range(len(split)))
    windows = zip(split.owners.tolist(), split.offsets, split.allowed, strict=True)
    return [(owner, offsets[allowed].tobytes()) for owner, offsets, allowed in windows]


def compute_logits(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Returns the logits for a batch; of a language model those at the queried positions, [rows, tokens]."""
    with restrict_logits(model, batch):
        said = find_logits(model(**build_inputs(model, batch)))
    assert said is not None
    return said


def top_log_probs(logits: Tensor) -> dict[str, Tensor]:
    """Returns `ids` and `log_probs` [rows, KEPT] of the likeliest tokens, and the `tail` [rows], the others' total."""
    found = torch.log_softmax(logits.float(), -1).topk(min(TOP_K, logits.shape[-1]))
    tail = (1 - found.values.exp().sum(-1)).clamp(min=0)
    return {"ids": found.indices, "log_probs": found.values, "tail": tail}


@dataclass(frozen=True)
class Judge:
    """Compares students with the teacher on a split.

    Args:
        task: Defines the rows of a batch.
        split: The split, encoded for the students.
        pad_id: The students' padding id.
        said: The teacher's outputs on the same split, in its order.
        temperature: The temperature of the loss.
    """

    task: Task
    split: Rows
    pad_id: int
    said: SplitOutputs
    temperature: float = 1.0

    @torch.no_grad()
    def divergence(self, student: PreTrainedModel) -> float:
        """Returns the mean distance between student and teacher over the split's rows.

        The distance is the KL divergence in nats at the temperature, for numbers the squared difference, and for
        vectors 1 - cosine. Windows that the student's tokenizer splits differently are left out, as are samples with a
        row per token whose number of tokens differs.

        Raises:
            InputError: No sample is left.
        """
        training = student.training
        student.eval()
        batches, total, count = EvalBatches(self.split, 2 * self.task.at_once, self.pad_id), 0.0, 0
        for rows, batch in zip(batches.order, batches, strict=True):
            own = by_row(batch, {"logits": compute_logits(student, batch)})["logits"]
            alike = [i for i, row in enumerate(rows) if len(own[i]) == self.length(row)]
            if alike:
                part = {name: value[alike] for name, value in batch.items()}
                distance, size = self.compared(
                    part, torch.cat([own[i] for i in alike]), [self.taught[rows[i]] for i in alike]
                )
                total, count = total + distance * size, count + size
        student.train(training)
        if not count:
            raise InputError(
                f"validation: expected samples that the student reads as its teacher does, found none of "
                f"{len(self.split)}: students can't be compared; leave all words with --prune.vocabulary false"
            )
        return total / count

    @cached_property
    def taught(self) -> dict[int, int]:
        """Index of the teacher's sample for each of the student's samples that the teacher was evaluated on too."""
        numbers = {place: number for number, place in enumerate(self.said.places)}
        return {row: numbers[place] for row, place in enumerate(places_of(self.split)) if place in numbers}

    def length(self, row: int) -> int:
        """Returns the number of rows in the teacher's outputs for a sample; 0 if there are none."""
        number = self.taught.get(row)
        return 0 if number is None else len(next(iter(self.said.samples[number].values())))

    def compared(self, batch: Batch, own: Tensor, rows: list[int]) -> tuple[float, int]:
        """Returns (mean distance, number of rows) of samples."""
        answers = self.task.answers
        mine, given = answers.logits(batch, own), answers.signals(batch, self.said.of(rows))
        return float(answers.distance(mine, given, answers.labels(batch), self.temperature)), len(mine)
