"""Positions, answers and an encode-decode round trip, shared by the tests of signals."""

import numpy as np
import torch

from distill.cache.signals import Signal, SignalMask, TeacherOutputs
from distill.cache.signals.rans import FrequencyTable

LENGTHS = [5, 1, 7, 3]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def key_of(i: int) -> bytes:
    return np.random.default_rng(i).bytes(16)


def positions_of_rows(lengths: list[int], chosen: list[list[int]] | None = None) -> SignalMask:
    """Returns rows with the given numbers of tokens; `chosen` lists each row's positions, all by default."""
    tokens = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    positions = tokens.clone()
    for row, places in enumerate(chosen or []):
        positions[row] = False
        positions[row, places] = True
    return SignalMask(tokens, positions)


def make_outputs(name: str, values: object, where: SignalMask) -> TeacherOutputs:
    return TeacherOutputs({name: values}, where, [key_of(i) for i in range(len(where.tokens))])


def round_trip(signal: Signal, outputs: TeacherOutputs) -> dict:
    """Returns the outputs after encoding and decoding with tables fitted to them."""
    rows = signal.rows(outputs)
    book = {name: FrequencyTable(starts) for name, starts in signal.fit(rows).items()}
    return signal.decode([memoryview(signal.encode(row, book)) for row in rows], outputs.mask, book)
