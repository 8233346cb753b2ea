"""Tests dense signals: bit-identical logits and embeddings, features to half a step, and generated sequences."""

import pytest
import torch

from distill.cache.signals import (
    KINDS,
    Dense,
    Generated,
    Hidden,
    Relations,
    Sampled,
    TopK,
    build_signal,
)
from distill.errors import InputError
from support.signalling import LENGTHS, key_of, make_outputs, positions_of_rows, round_trip, seeded


@pytest.mark.parametrize(
    "signal",
    [Dense(5), TopK(50, k=3), Sampled(50, draws=9), Hidden(8, (0, 2)), Relations(8, (1,)), Generated(50, new_tokens=4)],
    ids=lambda signal: signal.kind,
)
def test_signal_settings_survive_a_round_trip_through_json(signal):
    fields = {name: list(v) if isinstance(v, tuple) else v for name, v in signal.settings().items()}
    assert build_signal(fields) == signal
    assert KINDS[signal.kind] is type(signal)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (Sampled, {"draws": 0}, "keep.draws: expected 1 to 4096 draws per position, found 0"),
        (Sampled, {"draws": 5000}, "keep.draws: expected 1 to 4096 draws per position, found 5000"),
        (Sampled, {"temperature": 0.0}, "keep.temperature: expected more than 0, found 0.0"),
        (TopK, {"k": 51}, "keep.k: expected 1 to 50, found 51"),
        (TopK, {"k": 0}, "keep.k: expected 1 to 50, found 0"),
        (TopK, {"k": 5, "step": 0.0}, "keep.step, keep.temperature: expected more than 0, found 0.0 and 1.0"),
        (TopK, {"k": 5, "temperature": 0.0}, "keep.step, keep.temperature: expected more than 0, found 0.125 and 0.0"),
        (Dense, {"dtype": "int8"}, "keep.dtype: expected float32 or float16, found 'int8'"),
        (Hidden, {"layers": ()}, r"keep.layers: expected distinct layer numbers of at least 0, found \[\]"),
        (Hidden, {"layers": (1, 1)}, r"keep.layers: expected distinct layer numbers of at least 0, found \[1, 1\]"),
        (Hidden, {"layers": (0, -1)}, r"keep.layers: expected distinct layer numbers of at least 0, found \[0, -1\]"),
        (Generated, {"new_tokens": 0}, "expected new_tokens of at least 1 .* found 0 and "),
        (Generated, {"temperature": -1.0}, "a temperature of at least 0, found .* and -1.0"),
    ],
)
def test_invalid_settings_are_rejected(kind, settings, message):
    with pytest.raises(InputError, match=message):
        kind(50, **settings)


def test_a_vocabulary_too_large_for_three_byte_ids_is_rejected():
    Generated(1 << 24)
    with pytest.raises(InputError, match="3 bytes"):
        Generated((1 << 24) + 1)


# Dense


def random_finite(*shape: int) -> torch.Tensor:
    """Returns finite float32 numbers of every magnitude, including both zeros, the smallest and the largest."""
    bits = torch.randint(-(2**31), 2**31 - 1, shape, generator=seeded(), dtype=torch.int32)
    values = bits.view(torch.float32).nan_to_num(1.5, 2.5, -2.5)
    values.view(-1)[:4] = torch.tensor([0.0, -0.0, 1e-45, torch.finfo(torch.float32).max])
    return values


@pytest.mark.parametrize("of", ["logits", "embedding"])
def test_dense_values_of_a_sample_round_trip_bit_identically(of):
    values = random_finite(4, 7)
    restored = round_trip(Dense(7, of=of), make_outputs(of, values, positions_of_rows(LENGTHS)))[of]
    assert torch.equal(restored.view(torch.int32), values.view(torch.int32))


@pytest.mark.parametrize("chosen", [None, [[0, 4], [], [6], [1, 2]]], ids=["all tokens", "masked ones"])
def test_dense_values_of_a_position_round_trip_bit_identically(chosen):
    where, values = positions_of_rows(LENGTHS, chosen), random_finite(4, 7, 9)
    restored = round_trip(Dense(9, each="position"), make_outputs("logits", values, where))["logits"]
    assert torch.equal(restored.view(torch.int32), values[where.positions].view(torch.int32))


def test_float16_values_are_rounded_exactly_once():
    values = torch.randn(4, 7, generator=seeded()) * torch.logspace(-8, 4, 7)
    restored = round_trip(Dense(7, dtype="float16"), make_outputs("logits", values, positions_of_rows(LENGTHS)))[
        "logits"
    ]
    assert torch.equal(restored, values.half().float())


def test_a_value_beyond_the_range_of_float16_is_rejected():
    values = torch.zeros(4, 7)
    values[2, 3] = 7e4
    output = make_outputs("logits", values, positions_of_rows(LENGTHS))
    assert torch.equal(round_trip(Dense(7), output)["logits"], values)
    with pytest.raises(InputError, match=f"sample {key_of(2).hex()}"):
        Dense(7, dtype="float16").rows(output)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_sample_with_a_non_finite_value_is_rejected_with_its_key(bad):
    values = torch.zeros(4, 7)
    values[1, 6] = bad
    with pytest.raises(InputError, match=f"sample {key_of(1).hex()}"):
        Dense(7).rows(make_outputs("logits", values, positions_of_rows(LENGTHS)))


@pytest.mark.parametrize("each", ["sample", "position"])
def test_a_dense_record_of_another_size_is_rejected(each):
    signal, where = Dense(7, each=each), positions_of_rows([2])
    values = torch.zeros(1, 2, 7) if each == "position" else torch.zeros(1, 7)
    record = signal.encode(signal.rows(make_outputs("logits", values, where))[0], {})
    for changed in (record[:-4], record[:-1], record + bytes(28), b""):
        with pytest.raises(ValueError):
            signal.decode([memoryview(changed)], where, {})


# Hidden and Relations


def layers_of(count: int, width: int) -> list[torch.Tensor]:
    """Returns features [batch, length, width] whose scale varies by token; some tokens are all 0."""
    shape = (len(LENGTHS), max(LENGTHS))
    spread = 10 ** torch.empty(count, *shape, 1).uniform_(-6, 6, generator=seeded(1))
    values = torch.randn(count, *shape, width, generator=seeded(2)) * spread
    values[:, 0, 2] = 0
    return list(values)


def assert_close_to(found: torch.Tensor, exact: torch.Tensor) -> None:
    """Checks that errors are at most half a step of each token's scale and that padding is 0."""
    tokens = positions_of_rows(LENGTHS).tokens
    assert found.shape == exact.shape
    assert found.dtype == torch.float32
    assert not found[~tokens].any()
    largest = exact.abs().amax(-1, keepdim=True)
    error = (found - exact).abs()
    assert (error <= largest / 127 / 2 * (1 + 1e-4))[tokens].all()
    torch.testing.assert_close(found.abs().amax(-1)[tokens], largest[..., 0][tokens])


@pytest.mark.parametrize("stored", [(0,), (3,), (2, 0, 3)])
@pytest.mark.parametrize("width", [1, 33])
def test_hidden_states_round_trip_to_half_a_step_under_their_own_layer(width, stored):
    layers = layers_of(4, width)
    restored = round_trip(Hidden(width, stored), make_outputs("hidden", layers, positions_of_rows(LENGTHS)))["hidden"]
    assert list(restored) == list(stored)
    for layer in stored:
        assert_close_to(restored[layer], layers[layer])
        assert not restored[layer][0, 2].any()


@pytest.mark.parametrize("stored", [(1,), (2, 0)])
def test_queries_keys_and_values_round_trip_to_half_a_step(stored):
    flat = layers_of(9, 16)
    layers = [tuple(flat[3 * i : 3 * i + 3]) for i in range(3)]
    restored = round_trip(Relations(16, stored), make_outputs("relations", layers, positions_of_rows(LENGTHS)))[
        "relations"
    ]
    assert list(restored) == list(stored)
    for layer in stored:
        assert len(restored[layer]) == 3
        for each, exact in zip(restored[layer], layers[layer], strict=True):
            assert_close_to(each, exact)


def test_shared_keys_keep_their_width_and_equal_widths_keep_the_older_settings():
    flat, thin = layers_of(6, 16), layers_of(6, 4)
    layers = [(flat[i], thin[2 * i], thin[2 * i + 1]) for i in range(3)]
    signal = Relations.from_widths((16, 4, 4), (2, 0))
    assert build_signal(signal.settings()) == signal
    assert signal.nominal_bytes() == 2 * (16 + 4 + 4 + 3 * 4)
    restored = round_trip(signal, make_outputs("relations", layers, positions_of_rows(LENGTHS)))["relations"]
    for layer in (2, 0):
        for each, exact in zip(restored[layer], layers[layer], strict=True):
            assert_close_to(each, exact)
    assert Relations.from_widths((16, 16, 16), (1,)) == Relations(16, (1,))
    assert Relations(16, (1,)).settings() == {"kind": "relations", "width": 16, "layers": (1,)}


def test_the_smallest_and_the_largest_features_do_not_overflow():
    values = torch.zeros(4, 7, 3)
    values[..., 0], values[..., 1] = 1e-44, -1e-44
    values[1:] = torch.tensor([3e38, -3e38, 1.0])
    restored = round_trip(Hidden(3, (0,)), make_outputs("hidden", [values], positions_of_rows(LENGTHS)))["hidden"][0]
    assert restored.isfinite().all()
    assert (restored[0] - values[0]).abs().max() <= torch.finfo(torch.float32).tiny / 2
    torch.testing.assert_close(restored[1, 0], torch.tensor([3e38, -3e38, 0.0]))


def test_bfloat16_features_are_stored():
    layers = [values.bfloat16() for values in layers_of(1, 8)]
    restored = round_trip(Hidden(8, (0,)), make_outputs("hidden", layers, positions_of_rows(LENGTHS)))["hidden"][0]
    assert_close_to(restored, layers[0].float())


def test_features_of_another_width_or_with_nan_are_rejected():
    where, layers = positions_of_rows(LENGTHS), layers_of(3, 8)
    with pytest.raises(InputError, match="16, found 8"):
        Hidden(16, (0,)).rows(make_outputs("hidden", layers, where))
    narrow = [(layers[0], layers[1][..., :4], layers[2][..., :4])]  # as in grouped-query attention
    with pytest.raises(InputError, match="8, found 4"):
        Relations(8, (0,)).rows(make_outputs("relations", narrow, where))
    layers[1][3, 6] = torch.nan
    Hidden(8, (1,)).rows(make_outputs("hidden", layers, where))  # accepted in the padding
    layers[1][3, 2, 5] = torch.nan
    with pytest.raises(InputError, match="position 15 of a batch of 16"):
        Hidden(8, (0, 1)).rows(make_outputs("hidden", layers, where))


def test_a_feature_record_of_another_length_is_rejected():
    signal, where = Hidden(8, (0, 1)), positions_of_rows(LENGTHS)
    record = signal.encode(signal.rows(make_outputs("hidden", layers_of(2, 8), where))[0], {})
    for changed in (record[:-1], record + b"\0", record[: len(record) // 5 * 4], record[:3], b""):
        with pytest.raises(ValueError):
            signal.decode([memoryview(changed)], positions_of_rows([5]), {})


# Generated


def random_sequences(count: int, high: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    lengths = torch.arange(1, count + 1).tolist()
    ids = [torch.randint(0, high, (n,), generator=seeded(n)) for n in lengths]
    return ids, [-10 * torch.rand(n, generator=seeded(n)) for n in lengths]


def test_sequences_round_trip_with_their_log_probabilities():
    width = 1 << 24
    ids, log_probs = random_sequences(4, width)
    ids[1][:] = torch.tensor([0, width - 1])
    signal = Generated(width, new_tokens=4)
    restored = round_trip(signal, make_outputs("generated", (ids, log_probs), positions_of_rows(LENGTHS)))["generated"]
    for i in range(4):
        assert restored[0][i].dtype == torch.int64
        assert torch.equal(restored[0][i], ids[i])
        assert torch.equal(restored[1][i], log_probs[i].half().float())


def test_a_sequence_too_long_or_truncated_within_a_token_is_rejected():
    signal, where = Generated(100, new_tokens=4), positions_of_rows([1])
    for size in (1, 4, 6, 19, 21, 25):
        with pytest.raises(ValueError, match=f"expected a sequence of at most 4 tokens, found {size} bytes"):
            signal.decode([memoryview(bytes(size))], where, {})


@pytest.mark.parametrize("bad", [torch.nan, -torch.inf, -1e5])
def test_a_sequence_with_an_invalid_log_probability_is_rejected_with_its_key(bad):
    ids, log_probs = random_sequences(4, 50)
    log_probs[3][0] = bad
    with pytest.raises(InputError, match=f"sample {key_of(3).hex()}"):
        Generated(50, new_tokens=4).rows(make_outputs("generated", (ids, log_probs), positions_of_rows(LENGTHS)))
