"""Tests the entropy coder: round trips near the model's entropy and safe handling of corrupt records."""

from math import lgamma, log

import numpy as np
import pytest
import torch
from numba import njit, uint64

from distill.cache.signals import Sampled, TopK, rans, sampled, topk

RNG = np.random.default_rng
CANARY = 0xC0FFEE
WEIGHTS = {
    "one symbol": np.ones(1),
    "two symbols": np.array([1.0, 3.0]),
    "flat": np.ones(1000),
    "zipf": 1 / np.arange(1, 5001) ** 1.2,
    "gamma": RNG(0).gamma(0.05, size=3000) + 1e-9,
    "almost all on the first": np.r_[1e12, np.ones(999)],
    "almost all in the middle": np.r_[np.ones(300), 1e12, np.ones(300)],
    "almost all on the last": np.r_[np.zeros(50), 1.0],
    "as many symbols as frequencies": np.ones(1 << 16),
}


@njit
def push_all(symbols, starts, bits, stack):
    state, top = rans.START, 0
    for i in range(len(symbols) - 1, -1, -1):
        state, top = rans.push_symbol(state, stack, top, symbols[i], starts, bits)
    return state, stack, top


@njit
def pop_all(state, stack, top, starts, lookup, bits, out):
    for i in range(len(out)):
        out[i], state, top = rans.pop_symbol(state, stack, top, starts, lookup, bits)
    return state, stack, top


@njit
def push_sets(sets, starts, bits, stack):
    state, top, items = rans.START, 0, np.empty(sets.shape[1], np.int64)
    for i in range(len(sets) - 1, -1, -1):
        items[:] = sets[i]
        state, top = rans.push_set(state, stack, top, items, len(items), starts, bits)
    return state, stack, top


@njit
def pop_sets(state, stack, top, starts, lookup, bits, out):
    for i in range(len(out)):
        state, top = rans.pop_set(state, stack, top, out[i], out.shape[1], starts, lookup, bits)
    return state, stack, top


@njit
def push_ranks(ranks, counts, stack):
    state, top = rans.START, 0
    for i in range(len(ranks) - 1, -1, -1):
        state, top = rans.push_rank(state, stack, top, ranks[i], counts[i])
    return state, stack, top


@njit
def pop_ranks(state, stack, top, counts, out):
    for i in range(len(out)):
        out[i], state, top = rans.pop_rank(state, stack, top, counts[i])
    return state, stack, top


def empty_stack(words: int) -> np.ndarray:
    return np.empty(words, np.uint32)


def draw_symbols(starts: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Draws symbols in proportion to the table's frequencies, int64 [count]."""
    return np.searchsorted(starts, RNG(seed).integers(0, starts[-1], count), side="right") - 1


def bits_of(symbols: np.ndarray, starts: np.ndarray) -> float:
    """Returns the entropy of the symbols under the table, in bits."""
    frequencies = np.diff(starts.astype(np.int64))[symbols.ravel()]
    return float(np.log2(int(starts[-1])) * symbols.size - np.log2(frequencies).sum())


def encode_symbols(symbols: np.ndarray, starts: np.ndarray) -> bytes:
    return rans.pack_record(
        *push_all(symbols, *rans.FrequencyTable(starts).encoding_arrays, empty_stack(len(symbols) + 1))
    )


def decode_symbols(record: bytes, starts: np.ndarray, count: int) -> np.ndarray:
    out = np.empty(count, np.int64)
    check_end(*pop_all(*rans.unpack_record(memoryview(record)), *rans.FrequencyTable(starts).decoding_arrays, out))
    return out


def check_end(state: int, stack: np.ndarray, top: int) -> None:
    assert (state, top) == (rans.START, 0), "the record holds more than was popped"


@pytest.mark.parametrize("bits", [16, 24, 31])
@pytest.mark.parametrize("name", WEIGHTS)
def test_symbols_of_any_table_round_trip_near_its_entropy(name, bits):
    starts = rans.build_table(WEIGHTS[name], bits)
    symbols = draw_symbols(starts, 20_000, 1)
    record = encode_symbols(symbols, starts)
    assert np.array_equal(decode_symbols(record, starts, len(symbols)), symbols)
    entropy = bits_of(symbols, starts) / 8
    assert entropy - 1 <= len(record) <= 1.02 * entropy + 16


def test_the_rarest_symbols_round_trip():
    starts = rans.build_table(WEIGHTS["almost all in the middle"], 31)
    symbols = np.r_[0, 600, np.arange(601), [300] * 50, 599]
    assert np.array_equal(decode_symbols(encode_symbols(symbols, starts), starts, len(symbols)), symbols)


def test_a_table_of_the_fewest_bits_round_trips():
    starts = rans.build_table(RNG(3).random(700), rans.LOOKUP_BITS)
    symbols = RNG(4).integers(0, 700, 5000)
    assert np.array_equal(decode_symbols(encode_symbols(symbols, starts), starts, len(symbols)), symbols)


def test_a_table_of_16_million_symbols_round_trips():
    width = 1 << 24
    starts = rans.build_id_table(RNG(5).zipf(1.3, 100_000) % width, width)
    assert starts[-1] == 1 << 30
    symbols = np.r_[0, width - 1, draw_symbols(starts, 5000, 6), RNG(7).integers(0, width, 5000)]
    record = encode_symbols(symbols, starts)
    assert np.array_equal(decode_symbols(record, starts, len(symbols)), symbols)
    assert len(record) <= 1.02 * bits_of(symbols, starts) / 8 + 16


def test_an_empty_sequence_takes_only_the_coder_state():
    starts = rans.build_table(np.ones(4), 16)
    record = encode_symbols(np.zeros(0, np.int64), starts)
    assert len(record) == 8
    assert len(decode_symbols(record, starts, 0)) == 0


def test_ranks_round_trip_at_log2_of_their_count():
    counts = np.r_[np.arange(1, 4097), np.ones(50, np.int64), [65535] * 50]
    ranks = RNG(8).integers(0, counts)
    ranks[:4096:2] = counts[:4096:2] - 1
    record = rans.pack_record(*push_ranks(ranks, counts, empty_stack(len(ranks) + 1)))
    out = np.empty(len(ranks), np.int64)
    check_end(*pop_ranks(*rans.unpack_record(memoryview(record)), counts, out))
    assert np.array_equal(out, ranks)
    assert len(record) <= 1.02 * np.log2(counts).sum() / 8 + 16


@pytest.mark.parametrize("size", [1, 2, 24, 64, 1000])
@pytest.mark.parametrize("name", ["flat", "zipf", "gamma"])
def test_sets_round_trip_in_ascending_order_without_bits_for_an_order(name, size):
    starts = rans.build_table(WEIGHTS[name], 24)
    width = len(starts) - 1
    sets = np.sort(np.stack([RNG(9 + i).permutation(width)[:size] for i in range(200)]), 1)
    record = rans.pack_record(
        *push_sets(sets, *rans.FrequencyTable(starts).encoding_arrays, empty_stack(2 * sets.size + 8))
    )
    out = np.empty_like(sets)
    check_end(*pop_sets(*rans.unpack_record(memoryview(record)), *rans.FrequencyTable(starts).decoding_arrays, out))
    assert np.array_equal(out, sets)
    entropy = (bits_of(sets, starts) - len(sets) * lgamma(size + 1) / log(2)) / 8
    assert len(record) <= 1.02 * max(entropy, 0) + 16
    if size > 2:
        assert (
            len(record) < len(encode_symbols(sets.ravel(), starts)) - 0.95 * len(sets) * lgamma(size + 1) / log(2) / 8
        )


@pytest.mark.parametrize("bits", [16, 20, 31])
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_table_sums_to_its_power_of_two_and_every_symbol_has_a_frequency(name, bits):
    starts = rans.build_table(WEIGHTS[name], bits)
    assert starts.dtype == np.uint32
    assert starts[0] == 0
    assert starts[-1] == 1 << bits
    assert np.diff(starts.astype(np.int64)).min() >= 1
    assert rans.FrequencyTable(starts).bits == bits


def test_frequencies_of_a_table_are_close_to_its_weights():
    weights = WEIGHTS["zipf"]
    shares = np.diff(rans.build_table(weights, 24).astype(np.int64)) / 2**24
    np.testing.assert_allclose(shares, weights / weights.sum(), rtol=1e-3, atol=2 / 2**24)


@pytest.mark.parametrize(
    ("weights", "bits", "message"),
    [
        (np.ones(5000), 12, "expected 12 to 31 bits, enough for 5000 symbols, found 12 bits"),
        (np.ones(3), 11, "expected 12 to 31 bits, enough for 3 symbols, found 11 bits"),
        (np.ones(3), 32, "expected 12 to 31 bits, enough for 3 symbols, found 32 bits"),
        (np.zeros(3), 16, "expected weights with a positive, finite sum, found 0.0"),
        (np.array([1, np.nan]), 16, "expected weights with a positive, finite sum, found nan"),
    ],
    ids=["too many symbols", "too few bits", "too many bits", "no weight", "nan"],
)
def test_a_table_that_cannot_be_decoded_is_rejected(weights, bits, message):
    with pytest.raises(ValueError, match=message):
        rans.build_table(weights, bits)


@pytest.mark.parametrize(("width", "bits"), [(2, 16), (1 << 17, 23), (1 << 25, 31), ((1 << 25) + 1, 31)])
def test_an_id_table_has_six_spare_bits_within_16_to_31_bits(width, bits, monkeypatch):
    # Avoids several arrays of 2^25 numbers.
    monkeypatch.setattr(rans.np, "bincount", lambda ids, minlength: np.zeros(1))
    monkeypatch.setattr(rans, "build_table", lambda weights, bits: bits)
    assert rans.build_id_table(np.array([1]), width) == bits


def sampled_rows(draws: int, positions: int, width: int, seed: int) -> tuple[np.ndarray, ...]:
    """Returns ids, counts and sizes as `Sampled.rows` does for a sample."""
    rng = RNG(seed)
    sizes = rng.integers(1, draws + 1, positions).astype(np.int32)
    weights = 1 / np.arange(1, width + 1)
    ids = [np.sort(rng.choice(width, n, replace=False, p=weights / weights.sum())) for n in sizes]
    counts = [1 + rng.multinomial(draws - n, np.full(n, 1 / n)) for n in sizes]
    return np.concatenate(ids).astype(np.int32), np.concatenate(counts).astype(np.int32), sizes


def topk_rows(k: int, positions: int, width: int, seed: int) -> tuple[np.ndarray, ...]:
    rng = RNG(seed)
    ids = np.sort(np.stack([rng.permutation(width)[:k] for _ in range(positions)]), 1)
    levels, tails = rng.integers(0, 200, (positions, k)), rng.integers(0, topk.LEVELS, positions)
    return ids.astype(np.int32), levels.astype(np.int32), tails.astype(np.int32)


class CodedSample:
    """A signal's record of one sample and a decoder into arrays with canary rows behind the sample's."""

    def __init__(self, kind: str, positions: int = 6):
        self.positions = positions
        if kind == "sampled":
            self.signal, self.row = Sampled(500, draws=16), sampled_rows(16, positions, 500, 1)
        else:
            self.signal, self.row = TopK(500, k=16), topk_rows(16, positions, 500, 2)
        self.book = {name: rans.FrequencyTable(starts) for name, starts in self.signal.fit([self.row]).items()}
        self.record = self.signal.encode(self.row, self.book)

    def decode(self, record: bytes) -> list[np.ndarray]:
        state, stack, top = rans.unpack_record(memoryview(record))
        size = len(stack)
        stack = np.r_[stack, np.full(4096, CANARY, np.uint32)]
        ids, others = np.full((2, 2 * self.positions, 16), CANARY)
        tails = np.full(2 * self.positions, CANARY)
        parts = [array[: self.positions] for array in (ids, others, tails)]
        try:
            self.kernel(state, stack[:size], top, parts)
        finally:
            assert (stack[size:] == CANARY).all(), "the stack overflowed"
            for array in (ids, others, tails):
                assert (array[self.positions :] == CANARY).all(), "rows were written that are not the sample's"
        return parts

    def kernel(self, state: np.uint64, stack: np.ndarray, top: int, out: list[np.ndarray]) -> None:
        ids = self.book["ids"].decoding_arrays
        if isinstance(self.signal, Sampled):
            small = [array for name in ("sizes", "extras") for array in self.book[name].decoding_arrays[:2]]
            sampled.decode(state, stack, top, 16, *ids, *small, *out[:2])
        else:
            small = [array for name in ("floors", "tails", "above") for array in self.book[name].decoding_arrays[:2]]
            topk.decode(state, stack, top, *ids, topk.classify_ids(rans.FrequencyTable(ids[0])), *small, *out)

    def survives(self, record: bytes) -> bool:
        """Returns whether the record is rejected or, if it was changed, decodes to ids within bounds."""
        try:
            ids = self.decode(record)[0]
        except ValueError:
            return True
        return bool(((ids >= 0) & (ids < 500) | (ids == CANARY)).all()) and record != self.record


@pytest.fixture(scope="module", params=["sampled", "topk"])
def whole(request) -> CodedSample:
    return CodedSample(request.param)


def test_a_truncated_or_longer_record_is_rejected(whole):
    for end in range(len(whole.record)):
        with pytest.raises(ValueError):
            whole.decode(whole.record[:end])
    for extra in (b"\1", b"\1\0\0\0", b"\xff" * 400):
        with pytest.raises(ValueError):
            whole.decode(whole.record + extra)


def test_any_changed_bit_is_rejected_or_stays_in_bounds(whole):
    for bit in range(8 * len(whole.record)):
        changed = bytearray(whole.record)
        changed[bit // 8] ^= 1 << bit % 8
        assert whole.survives(bytes(changed)), bit


def test_random_records_never_write_out_of_bounds(whole):
    rng = RNG(10)
    state = bytes(7) + b"\x40"
    for _ in range(3000):
        words = 4 * rng.integers(0, 100)
        for tail in (rng.bytes(words), bytes(words), b"\xff" * words):
            assert whole.survives(rng.bytes(7) + b"\x3f" + tail)
            assert whole.survives(state + tail)


def test_a_record_of_another_number_of_positions_is_rejected(whole):
    with pytest.raises(ValueError, match="does not end with its last position"):
        whole.signal.decode([memoryview(whole.record)], Positions(whole.positions - 1), whole.book)
    with pytest.raises(ValueError):
        whole.signal.decode([memoryview(whole.record)], Positions(whole.positions + 1), whole.book)


class Positions:
    """A `SignalMask` of one sample with `count` positions."""

    def __init__(self, count: int):
        self.positions = torch.ones(1, count, dtype=torch.bool)


@pytest.mark.parametrize("state", [0, 1, 2**31 - 1, 2**63, 2**64 - 1])
def test_an_invalid_coder_state_is_rejected(state):
    with pytest.raises(ValueError, match="expected a state followed by 32-bit words, found 88 bytes"):
        rans.unpack_record(memoryview(state.to_bytes(8, "little") + bytes(80)))


def test_a_push_onto_a_full_stack_is_rejected():
    with pytest.raises(ValueError, match="outgrows"):
        rans.push(np.uint64(2**63 - 1), empty_stack(3), 3, uint64(0), uint64(1), uint64(16))


def test_a_pop_from_an_empty_stack_is_rejected():
    with pytest.raises(ValueError, match="too early"):
        rans.pop(np.uint64(2**31), empty_stack(3), 0, uint64(0), uint64(1), uint64(16))


def test_a_set_with_a_duplicate_id_is_rejected():
    starts = rans.build_table(np.r_[1e12, np.ones(9)], 16)
    record = encode_symbols(np.zeros(500, np.int64), starts)
    empty = np.empty((1, 500), np.int64)
    with pytest.raises(ValueError, match="twice"):
        pop_sets(*rans.unpack_record(memoryview(record)), *rans.FrequencyTable(starts).decoding_arrays, empty)


def test_a_set_far_larger_than_the_fitted_ones_round_trips():
    """A position has 2000 ids, of which 20 occur nearly everywhere: few bits are available to draw their order from."""
    signal = Sampled(60_000, draws=4096)
    usual = np.arange(20, dtype=np.int32), np.r_[4077, np.ones(19)].astype(np.int32), np.array([20])
    wide = np.arange(2000, dtype=np.int32), np.r_[2097, np.ones(1999)].astype(np.int32), np.array([2000])
    book = {name: rans.FrequencyTable(starts) for name, starts in signal.fit([usual] * 1000).items()}
    restored = signal.decode([memoryview(signal.encode(wide, book))], Positions(1), book)
    assert np.array_equal(restored["ids"][0], wide[0])
    assert np.array_equal(restored["weights"][0] * 4096, wide[1])
