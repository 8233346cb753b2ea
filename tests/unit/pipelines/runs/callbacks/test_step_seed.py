"""Tests that each process and each batch have random numbers of their own, which a resumed run draws again."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch

from pipelines.runs.callbacks.step_seed import StepSeed, mix_seed, seed_device


def draw(rank: int, segment: tuple[int, int], batch: int = 5, seed: int = 3) -> tuple[float, ...]:
    """Returns what a process draws in a batch of the second epoch."""
    data = SimpleNamespace(find_rank=lambda: (rank, 2), find_segment=lambda: segment)
    trainer = SimpleNamespace(datamodule=data, current_epoch=1, num_training_batches=10)
    with torch.random.fork_rng(devices=[]):
        StepSeed(seed).on_train_batch_start(trainer, SimpleNamespace(device=torch.device("cpu")), None, batch)
        return tuple(torch.rand(3).tolist())


@pytest.mark.parametrize("segments", [1, 2, 4])
def test_every_process_and_batch_draws_other_numbers_and_the_same_ones_again(segments):
    places = list(product(range(2), range(segments), (5, 6)))
    draws = [draw(rank, (segment, segments), batch) for rank, segment, batch in places]
    assert len(set(draws)) == len(places)
    assert draws == [draw(rank, (segment, segments), batch) for rank, segment, batch in places]


def test_every_run_draws_other_numbers():
    assert len({draw(0, (0, 1), seed=seed) for seed in range(20)}) == 20


def test_a_device_is_seeded_as_torch_does_it():
    for seed in (0, mix_seed(7, 2, 41)):
        torch.manual_seed(seed)
        expected = torch.rand(4)
        seed_device(seed, torch.device("cpu"))
        assert torch.equal(torch.rand(4), expected)
