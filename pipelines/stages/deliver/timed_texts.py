"""The texts that models are timed on: blocks of rows, each with the lengths of the whole split."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from compress.measure.latency import TimedInputs
from distill.data.batches.packing import find_padding_id

if TYPE_CHECKING:
    from distill.data.batches.batches import EncodedRows
    from distill.data.batches.encode import Batch
    from distill.tasks.task import Task

EncodedTexts: TypeAlias = tuple["EncodedRows", int]  # rows of a split, and the pad id


@dataclass(frozen=True)
class RowBlocks:
    """Blocks of rows of a split; a block has a row of each stratum of lengths, and the next one other rows.

    The median length of a few random texts differs from that of the data by several percent, and the latency with it.
    Rows are repeated once a stratum is used up.

    Source: proportional stratified sampling (Cochran 1977, Sampling Techniques, chapter 5).
    """

    strata: Sequence[np.ndarray]
    seed: int

    @staticmethod
    def cut(lengths: np.ndarray, size: int, seed: int) -> "RowBlocks":
        """Returns blocks of `size` rows, in an order drawn by the seed, of rows with these lengths."""
        rng = np.random.default_rng(seed)
        rows = rng.permutation(len(lengths))
        rows = rows[np.argsort(lengths[rows], kind="stable")]
        count = max(size, len(rows))
        rows = rows[np.arange(count) * len(rows) // count]  # a split with fewer rows repeats each in its place
        return RowBlocks([rng.permutation(stratum) for stratum in np.array_split(rows, size)], seed)

    def draw(self, number: int) -> np.ndarray:
        """Returns the rows of a block, shuffled."""
        rows = np.array([stratum[number % len(stratum)] for stratum in self.strata])
        return np.random.default_rng([self.seed, number]).permutation(rows)


def encode_split(checkpoint: Path, part: object, max_length: int, task: "Task") -> EncodedTexts:
    """Returns a split encoded by a checkpoint's own tokenizer, and its pad id."""
    from pipelines.stages.prepare.vocabulary import load_student_tokenizer

    tokenizer = load_student_tokenizer(checkpoint)
    return task.encode(tokenizer, part, max_length), find_padding_id(tokenizer)


def collate_calls(texts: EncodedTexts, rows: np.ndarray, batch: int, length: int = 0) -> list[TimedInputs]:
    """Returns the inputs of calls of `batch` rows each; with a `length`, every text has as many tokens.

    Rows that don't fill a call are left out.
    """
    encoded, pad_id = texts
    groups = [rows[first : first + batch] for first in range(0, len(rows), batch)]
    calls = [to_arrays(encoded.collate(group, pad_id)) for group in groups if len(group) == batch]
    return [repeat_tokens(call, length) for call in calls] if length else calls


def repeat_tokens(inputs: Mapping[str, np.ndarray], length: int) -> TimedInputs:
    """Returns inputs of `length` tokens a text, each repeated or truncated to it."""
    times = -(-length // inputs["input_ids"].shape[1])
    return {name: np.ascontiguousarray(np.tile(value, (1, times))[:, :length]) for name, value in inputs.items()}


def to_arrays(batch: "Batch") -> TimedInputs:
    """Returns the model inputs of a batch as arrays, with token types, which are 0 if the batch has none."""
    from distill.models.inputs import select_inputs

    inputs = select_inputs(batch)
    inputs.setdefault("token_type_ids", batch["input_ids"] * 0)  # the models' own default for single texts
    return {name: value.numpy() for name, value in inputs.items()}
