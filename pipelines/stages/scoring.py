"""What a model says of a split, its score, and how far students are from that."""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from distill.checkpoint.outputs import find_logits
from distill.data.batches.batches import EvalBatches, Rows
from distill.data.batches.encode import Batch
from distill.data.rows.questions import Windows
from distill.errors import InputError
from distill.models.inputs import model_inputs
from distill.models.output_head import asked_words
from distill.tasks.logit_rows import by_row
from distill.tasks.task import Task

KEPT = 64  # of a vocabulary's logits: those of all words would take gigabytes


@dataclass(frozen=True)
class Said:
    """What a model says of a split.

    Args:
        samples: Of each its signals by name, as caches have them: [1, ...] or [asked positions, ...].
        score: By the task's metric while training; higher is better.
        places: What each sample is, see `places_of`.
        temperature: That the distributions were softened by before they were cut to KEPT words; None of whole ones.
    """

    samples: list[dict[str, Tensor]]
    score: float
    places: list[Hashable]
    temperature: float | None = None

    def of(self, rows: list[int]) -> dict[str, Any]:
        """Signals of some samples, joined."""
        told = {"temperature": self.temperature} if self.temperature else {}
        return {name: torch.cat([self.samples[i][name] for i in rows]) for name in self.samples[rows[0]]} | told


@torch.no_grad()
def said_of(model: PreTrainedModel, split: Rows, pad_id: int, task: Task, temperature: float = 1.0) -> Said:
    """Asks the model, which is left in eval mode."""
    model.eval()
    batches, metric = EvalBatches(split, 2 * task.at_once, pad_id), task.metric()
    words = task.kept == "sampled"
    samples: list[dict[str, Tensor]] = [{} for _ in range(len(split))]
    for rows, batch in zip(batches.order, batches, strict=True):
        said = answered(model, batch)
        metric.update(task.answers.logits(batch, said), task.answers.labels(batch))
        for row, own in zip(rows, by_row(batch, {"logits": said})["logits"], strict=True):
            samples[row] = likeliest(own / temperature) if words else {"logits": own}
    return Said(samples, float(metric.compute()), places_of(split), temperature if words else None)


def places_of(split: Rows) -> list[Hashable]:
    """What tells a sample from the others of its split, whoever reads it: its number; of a window on a context, which
    others may cut elsewhere, the question and the first and last character of every token.
    """
    if not isinstance(split, Windows):
        return list(range(len(split)))
    windows = zip(split.owners.tolist(), split.offsets, split.allowed, strict=True)
    return [(owner, offsets[allowed].tobytes()) for owner, offsets, allowed in windows]


def answered(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Logits for a batch; of a vocabulary those at the asked positions, [rows, words]."""
    with asked_words(model, batch):
        said = find_logits(model(**model_inputs(model, batch)))
    assert said is not None
    return said


def likeliest(logits: Tensor) -> dict[str, Tensor]:
    """`ids` and `log_probs` [rows, KEPT] of the likeliest words, and the `tail` [rows] of all others."""
    found = torch.log_softmax(logits.float(), -1).topk(min(KEPT, logits.shape[-1]))
    tail = (1 - found.values.exp().sum(-1)).clamp(min=0)
    return {"ids": found.indices, "log_probs": found.values, "tail": tail}


@dataclass(frozen=True)
class Judge:
    """What students are compared on.

    Args:
        task: What a row is.
        split: As the students read it.
        pad_id: Of their padding.
        said: What the teacher says of the same split, in its order.
        temperature: That of the loss.
    """

    task: Task
    split: Rows
    pad_id: int
    said: Said
    temperature: float = 1.0

    @torch.no_grad()
    def divergence(self, student: PreTrainedModel) -> float:
        """Mean distance from the teacher over the split's rows: the KL divergence in nats at the temperature; of
        numbers the squared difference, of vectors 1 - cosine.

        Samples that the student reads in another number of tokens, where there is a row a token, are left out, and
        windows that it cuts elsewhere.

        Raises:
            InputError: No sample is left.
        """
        training = student.training
        student.eval()
        batches, total, count = EvalBatches(self.split, 2 * self.task.at_once, self.pad_id), 0.0, 0
        for rows, batch in zip(batches.order, batches, strict=True):
            own = by_row(batch, {"logits": answered(student, batch)})["logits"]
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
        """Number of the teacher's sample for each of the students' that the teacher read too."""
        numbers = {place: number for number, place in enumerate(self.said.places)}
        return {row: numbers[place] for row, place in enumerate(places_of(self.split)) if place in numbers}

    def length(self, row: int) -> int:
        """Rows of what the teacher says of a sample; 0 where it didn't read it."""
        number = self.taught.get(row)
        return 0 if number is None else len(next(iter(self.said.samples[number].values())))

    def compared(self, batch: Batch, own: Tensor, rows: list[int]) -> tuple[float, int]:
        """(mean distance, number of rows) of samples."""
        answers = self.task.answers
        mine, given = answers.logits(batch, own), answers.signals(batch, self.said.of(rows))
        return float(answers.distance(mine, given, answers.labels(batch), self.temperature)), len(mine)
