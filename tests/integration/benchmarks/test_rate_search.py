"""The search of a value by the first seed."""

from benchmarks.common.rate_search import train_at_best


def test_the_first_seed_chooses_and_no_training_is_repeated():
    calls = []

    def train(rate: float, seed: int) -> tuple[float, int]:
        calls.append((rate, seed))
        return rate, seed

    results = train_at_best(train, [1.0, 3.0, 2.0], [5, 6, 7], lambda result: result[0])
    assert results == [(3.0, 5), (3.0, 6), (3.0, 7)]
    assert calls == [(1.0, 5), (3.0, 5), (2.0, 5), (3.0, 6), (3.0, 7)]
