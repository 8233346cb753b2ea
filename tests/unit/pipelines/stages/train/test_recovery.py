"""Tests the learning rate of pruned students."""

import pytest
import torch

from distill.slicing import Shape, find_axes, prune
from distill.train.config import TrainConfig
from pipelines.stages.train.recovery_rate import count_layer_weights, scale_learning_rate
from support.tiny_models import build_model


def test_the_learning_rate_grows_with_the_share_of_pruned_weights():
    start, train = build_model("bert"), TrainConfig(learning_rate=1e-3)
    axes = find_axes(start)
    few = {name: torch.arange(4) for name in (axis.name for axis in axes) if name.endswith("ffn")}
    rates = []
    for shape in (Shape((0, 1, 2, 3)), Shape((0, 1, 2)), Shape((0,), few)):
        student = prune(start, axes, shape)
        rate = scale_learning_rate(train, student, start).learning_rate
        share = 1 - count_layer_weights(student) / count_layer_weights(start)
        assert rate == pytest.approx(1e-3 * max(1e-2, share) ** 0.5)
        rates.append(rate)
    assert rates == sorted(rates)
    assert rates[0] == pytest.approx(1e-4)
    assert rates[-1] < 1e-3


def test_the_embedding_table_does_not_count_as_layer_weights():
    start = build_model("bert")
    table = start.get_input_embeddings().weight
    assert count_layer_weights(start) + table.numel() == start.num_parameters()
