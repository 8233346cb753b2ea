"""What replicas share: weights in a file, a counter, and parts of the student."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from pipelines.runs.replicas.averaging import split_parameters
from pipelines.runs.replicas.hogwild import SharedCounter, SharedWeights


def test_a_change_of_shared_weights_is_seen_by_all(tmp_path):
    torch.manual_seed(0)
    first, second, third = (nn.Linear(3, 2) for _ in range(3))
    SharedWeights(tmp_path, first).create()
    SharedWeights(tmp_path, second).create()  # of a later start: the file stays
    for module in (first, second):
        SharedWeights(tmp_path, module).attach()
    assert torch.equal(first.weight, second.weight)
    with torch.no_grad():
        second.weight += 1
    assert torch.equal(first.weight, second.weight)
    SharedWeights(tmp_path, third).read()
    assert torch.equal(third.weight, first.weight)
    assert torch.equal(third.bias, first.bias)


def test_tied_weights_stay_tied(tmp_path):
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight = module[0].weight
    SharedWeights(tmp_path, module).create()
    SharedWeights(tmp_path, module).attach()
    with torch.no_grad():
        module[0].weight.fill_(2)
    assert torch.equal(module[1].weight, torch.full((4, 4), 2.0))


def test_no_number_is_taken_twice(tmp_path):
    def take(_: int) -> list[int]:
        counter = SharedCounter(tmp_path)  # a handle of its own, as in another process
        return [counter.take() for _ in range(200)]

    with ThreadPoolExecutor(4) as pool:
        numbers = [number for part in pool.map(take, range(4)) for number in part]
    assert sorted(numbers) == list(range(800))
    assert SharedCounter(tmp_path).read() == 800


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_every_parameter_is_in_one_part(count):
    parameters = list(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).parameters())
    parts = split_parameters(parameters, count)
    assert [each for part in parts for each in part.parameters()] == parameters
    assert len(parts) <= count


def test_parts_have_about_the_same_size():
    parameters = [nn.Parameter(torch.zeros(10)) for _ in range(9)]
    sizes = [sum(each.numel() for each in part.parameters()) for part in split_parameters(parameters, 3)]
    assert sizes == [30, 30, 30]
