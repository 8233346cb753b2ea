"""Batches that processes claim."""

import itertools
from collections import Counter

from distill.data.batches.batches import TrainBatches
from distill.data.batches.claimed import ClaimedBatches
from distill.data.batches.encode import encode_samples
from support.processes.training_ranks import examples


class Numbers:
    def __init__(self):
        self.taken = itertools.count()
        self.last = 0

    def take(self) -> int:
        self.last = next(self.taken)
        return self.last

    def read(self) -> int:
        return self.last + 1


def test_every_row_is_claimed_once_an_epoch(tokenizer):
    rows = encode_samples(tokenizer, examples(23, 1), 32)
    numbers = Numbers()
    sides = [ClaimedBatches(TrainBatches(rows, 4, 0, seed=0), numbers, epochs=3, accumulate=2) for _ in range(2)]
    assert [len(side) for side in sides] == [18, 18]
    readers, labels = [iter(side) for side in sides], []
    while readers:
        for reader in list(readers):
            batch = next(reader, None)
            if batch is None:
                readers.remove(reader)
            else:
                labels.append(batch["input_ids"].shape[0])
    assert sum(labels) == 3 * 23
    assert sum(side.position for side in sides) == 18


def test_batches_are_those_of_a_single_process(tokenizer):
    rows = encode_samples(tokenizer, examples(23, 1), 32)
    plain = TrainBatches(rows, 4, 0, seed=5)
    expected = Counter(batch["input_ids"].numpy().tobytes() for _ in range(2) for batch in plain)
    claimed = ClaimedBatches(TrainBatches(rows, 4, 0, seed=5), Numbers(), epochs=2)
    assert Counter(batch["input_ids"].numpy().tobytes() for batch in claimed) == expected
