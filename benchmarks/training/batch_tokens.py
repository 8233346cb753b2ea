"""Rate of training with batches of tokens and with batches of rows, on the lengths of real texts.

    python -m benchmarks.training.batch_tokens
    python -m benchmarks.training.batch_tokens --data FOLDER_OF_TEXT --texts 64 --rounds 1         # a quick trial

All forms train the same student, layers of MiniLM, on the same texts with labels drawn at random. `rows` are the usual
batches of texts of similar length. `same memory` limits tokens to those of the rows' largest batch, `same steps` to
about those of their average one. Each form trains a copy on all texts per round; the forms alternate. Printed per data
set and form: the optimizer steps, the tokens with padding of the largest batch, the share of padding, the median useful
tokens per second (padding isn't counted), and the median ratio to the rows within a round. The bound is the ratio if
padded tokens cost what they cost in the largest batches and steps and padding beyond those of `same memory` cost
nothing. Times on a busy machine mean nothing.
"""

import argparse
import copy
import statistics
from collections.abc import Mapping

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from benchmarks.common.machine import describe_setup
from benchmarks.common.timing import median_ratio
from benchmarks.memory.activations import LABELS_ONLY
from benchmarks.training.optimizer_scores import MODEL
from compress.measure.turns import time_in_turns
from distill.checkpoint.folder import locate_checkpoint
from distill.checkpoint.tokenizer import load_tokenizer
from distill.data.batches.batches import TrainBatches, round_lengths
from distill.data.batches.encode import Encoded, encode_samples
from distill.data.batches.packing import find_padding_id
from distill.data.sources.text_files import read_texts
from distill.data.splits.examples import Examples
from distill.student.build import build_student
from distill.tasks.text_classification import TextClassification
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from distill.train.optimizer import build_optimizer
from pipelines.runs.console import Console

CLASSES = 10


def main() -> None:
    """Times all forms on all data sets and prints a table for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", default=["examples/data/banking77"], help="texts, as read by `read_texts`")
    parser.add_argument("--student", default="layers=3")
    parser.add_argument("--rows", type=int, default=32, help="of the usual batches")
    parser.add_argument("--length", type=int, default=256, help="tokens of a text; longer ones are truncated")
    parser.add_argument("--texts", type=int, default=2048, help="texts per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    console = Console()
    console.say(f"{describe_setup()}, {options.threads} threads")
    source = locate_checkpoint(MODEL, "teacher")
    tokenizer = load_tokenizer(source)
    task = TextClassification(tuple(map(str, range(CLASSES))))
    student = build_student(task.load(str(source), 0), options.student, 0)
    for data in options.data:
        encoded = draw_texts(data, tokenizer, options)
        plans = plan_batches(encoded, find_padding_id(tokenizer), options.rows)
        trainings = {name: Training(student, batches) for name, batches in plans.items()}
        steps = {name: training.train_epoch for name, training in trainings.items()}
        times = time_in_turns(steps, options.rounds, warmup=1)
        print_table(console, data, encoded, trainings, times)


def draw_texts(data: str, tokenizer: PreTrainedTokenizerFast, options: argparse.Namespace) -> Encoded:
    """Returns encoded texts of the training split, with random labels."""
    texts, rng = read_texts(data), np.random.default_rng(0)
    chosen = [texts[i] for i in rng.permutation(len(texts))[: options.texts]]
    labels = rng.integers(CLASSES, size=len(chosen)).tolist()
    return encode_samples(tokenizer, Examples(chosen, labels=labels), options.length)


def plan_batches(encoded: Encoded, pad_id: int, rows: int) -> dict[str, TrainBatches]:
    """Returns the batches of each form."""
    usual = TrainBatches(encoded, rows, pad_id, seed=0)
    sizes = [len(batch) * int(encoded.lengths[batch].max()) for batch in usual.order_rows(0)]
    largest, mean = max(sizes), round(statistics.mean(sizes))
    return {
        "rows": usual,
        "same memory": TrainBatches(encoded, rows, pad_id, batch_tokens=largest, seed=0),
        "same steps": TrainBatches(encoded, rows, pad_id, batch_tokens=mean, seed=0),
        "bound": TrainBatches(level_lengths(encoded), rows, pad_id, batch_tokens=largest, seed=0),
    }


def level_lengths(encoded: Encoded) -> Encoded:
    """Returns the same tokens, but for a remainder, in rows that are all of the mean length, a multiple of 8."""
    length = int(round_lengths(np.array([round(float(encoded.lengths.mean()))]))[0])
    joined = np.concatenate(list(encoded.input_ids))
    rows = [joined[start : start + length] for start in range(0, len(joined) - length + 1, length)]
    types = None if encoded.token_type_ids is None else [np.zeros_like(row) for row in rows]
    return Encoded(rows, types, np.resize(encoded.labels, len(rows)), 0)


class Training:
    """A copy of the student that is trained on all batches of a form."""

    def __init__(self, student: PreTrainedModel, batches: TrainBatches):
        train = TrainConfig()
        self.module = DistillationModule(copy.deepcopy(student).train(), loss=LABELS_ONLY, train=train)
        self.optimizer = build_optimizer(self.module.student, [], train)
        self.batches = [batches.build_batch((rows, 0, 0)) for rows in batches.order_rows(0)]

    def train_epoch(self) -> None:
        """Trains on every batch once."""
        for number, batch in enumerate(self.batches):
            loss = self.module.training_step(batch, number)
            assert loss is not None
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def count_tokens(self) -> int:
        """Returns the number of tokens without padding."""
        return sum(int(batch["attention_mask"].sum()) for batch in self.batches)

    def list_sizes(self) -> list[int]:
        """Returns each batch's number of tokens with padding."""
        return [batch["input_ids"].numel() for batch in self.batches]


def print_table(
    console: Console,
    data: str,
    encoded: Encoded,
    trainings: Mapping[str, Training],
    times: Mapping[str, list[float]],
) -> None:
    """Prints steps, sizes and rates of each form."""
    rates = {
        name: [training.count_tokens() / seconds for seconds in times[name]] for name, training in trainings.items()
    }
    rows = []
    for name, training in trainings.items():
        sizes = training.list_sizes()
        padding = 1 - training.count_tokens() / sum(sizes)
        rows.append(
            (name, f"{len(sizes)}", f"{max(sizes):,}", f"{padding:.1%}", f"{statistics.median(rates[name]):,.0f}",
             f"{median_ratio(rates[name], rates['rows']):.2f}")
        )  # fmt: skip
    lengths = encoded.lengths
    console.table(
        f"{data}: {len(lengths):,} texts of {lengths.mean():.0f} tokens on average, {np.median(lengths):.0f} in the "
        f"median, {lengths.max()} at most",
        ("batches", "steps", "largest batch", "padding", "useful tokens/s", "of rows"),
        rows,
    )


if __name__ == "__main__":
    main()
