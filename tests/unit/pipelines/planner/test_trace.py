"""Steps traced without data, in worlds of one process, against what is known of them by arithmetic."""

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from distill.parallel.layout import parse_layout
from distill.train.config import TrainConfig
from pipelines.planner.trace import StepTrace, simulate_world, trace_step

CONFIG = BertConfig(
    vocab_size=1000, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256, num_labels=4
)
ROWS, LENGTH = 8, 32


def build() -> BertForSequenceClassification:
    return BertForSequenceClassification(CONFIG)


def draw_batch() -> dict[str, torch.Tensor]:
    ids = torch.ones(ROWS, LENGTH, dtype=torch.long)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.zeros(ROWS, dtype=torch.long)}


def trace(layout: str, processes: int, **train: object) -> StepTrace:
    with simulate_world(processes):
        return trace_step(build, draw_batch, parse_layout(layout, processes), TrainConfig(**train))


@pytest.fixture(scope="module")
def parameters() -> int:
    return build().num_parameters()


def test_a_whole_model_has_sixteen_bytes_a_parameter(parameters):
    found = trace("replicated", 1).memory
    assert found["optimizer"] == pytest.approx(8 * parameters, rel=1e-3)
    assert 4 * parameters <= found["weights"] < 4.1 * parameters  # and positions, which are buffers
    assert 0.5 * 4 * parameters < found["gradients"] + found["buffers"] + found["activations"]


@pytest.mark.parametrize("layout", ["fsdp=4", "zero2", "hsdp=2x4"])
def test_states_are_divided_among_the_shards(layout, parameters):
    found = trace(layout, 8 if layout.startswith("hsdp") else 4)
    assert found.memory["optimizer"] == pytest.approx(8 * parameters / 4, rel=0.05)
    assert found.sent


@pytest.mark.parametrize(("layout", "fsdp"), [("tp=4", 1), ("fsdp=2,tp=2", 2)])
def test_tensor_parallelism_divides_products_and_their_work(layout, fsdp, parameters):
    """Positions, norms and biases of results that are summed stay whole on every process of a product."""
    config, tp = CONFIG, 4 // fsdp
    whole = config.max_position_embeddings * config.hidden_size
    found = trace(layout, 4)
    expected = 8 * ((parameters - whole) / tp + whole) / fsdp
    assert found.memory["optimizer"] == pytest.approx(expected, rel=0.1)
    assert found.flops == pytest.approx(trace("replicated", 1).flops / tp, rel=0.1)


def test_work_is_that_of_the_products():
    """Forward and backward of a product are 6 operations for each weight and token."""
    layer = 4 * 64 * 64 + 2 * 64 * 256
    expected = 6 * 3 * layer * ROWS * LENGTH
    assert expected < trace("replicated", 1).flops < 1.2 * expected
    assert trace("replicated", 1, checkpointing="full").flops > 1.3 * expected


def test_low_bit_states_and_checkpointing_take_less():
    plain, small = trace("replicated", 1), trace("replicated", 1, optimizer="sgd")
    assert small.memory["optimizer"] == pytest.approx(plain.memory["optimizer"] / 2, rel=1e-3)
    assert trace("replicated", 1, checkpointing="full").peak < plain.peak


def test_fsdp_gathers_and_scatters_every_weight(parameters):
    sent = trace("fsdp=4", 4).sent
    assert sent["reduce_scatter_base"] == pytest.approx(4 * parameters / 4, rel=0.05)
    assert 4 * parameters <= sent["allgather_base"] <= 2.2 * 4 * parameters
