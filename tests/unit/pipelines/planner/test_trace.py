"""Steps traced without data, in worlds of one process, against what is known of them by arithmetic."""

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import BertConfig, BertForSequenceClassification

from distill.parallel.layout import parse_layout
from distill.train.config import TrainConfig
from pipelines.planner.fake_process_group import simulate_world
from pipelines.planner.operator_counter import WorkCounter
from pipelines.planner.trace import Query, StepTrace, StepTracker, Training, trace_query, trace_step

CONFIG = BertConfig(
    vocab_size=1000, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256, num_labels=4
)
ROWS, LENGTH = 8, 32


def build() -> BertForSequenceClassification:
    return BertForSequenceClassification(CONFIG)


def build_fake_batch() -> dict[str, torch.Tensor]:
    ids = torch.ones(ROWS, LENGTH, dtype=torch.long)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.zeros(ROWS, dtype=torch.long)}


def trace(layout: str, processes: int, **train: object) -> StepTrace:
    with simulate_world(processes):
        return trace_step(
            Training(build, build_fake_batch, train=TrainConfig(**train)), parse_layout(layout, processes)
        )


def trace_frozen(layout: str, processes: int) -> StepTrace:
    with simulate_world(processes):
        return trace_query(Query(build, build_fake_batch), parse_layout(layout, processes))


def sum_sent(trace: StepTrace, kind: str) -> int:
    return sum(size for each, size in trace.sent.items() if each.kind == kind)


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
    assert found.work.flops == pytest.approx(trace("replicated", 1).work.flops / tp, rel=0.1)


def test_work_is_that_of_the_products():
    """Forward and backward of a product are 6 operations for each weight and token."""
    layer = 4 * 64 * 64 + 2 * 64 * 256
    expected = 6 * 3 * layer * ROWS * LENGTH
    assert expected < trace("replicated", 1).work.flops < 1.2 * expected
    assert trace("replicated", 1, checkpointing="full").work.flops > 1.3 * expected


def test_low_bit_states_and_checkpointing_take_less():
    plain, small = trace("replicated", 1), trace("replicated", 1, optimizer="sgd")
    assert small.memory["optimizer"] == pytest.approx(plain.memory["optimizer"] / 2, rel=1e-3)
    assert trace("replicated", 1, checkpointing="full").peak < plain.peak


def test_fsdp_gathers_and_scatters_every_weight(parameters):
    found = trace("fsdp=4", 4)
    assert sum_sent(found, "reduce_scatter_base") == pytest.approx(4 * parameters / 4, rel=0.05)
    assert 4 * parameters <= sum_sent(found, "allgather_base") <= 2.2 * 4 * parameters
    assert {each.ranks for each in found.sent} == {(0, 1, 2, 3)}
    assert not any(each.waits for each in found.sent)


def test_gloo_copies_what_it_scatters():
    peaks = []
    for copies in (False, True):
        counter = WorkCounter()
        tracker = StepTracker(counter, copies=copies)
        with simulate_world(4), FakeTensorMode(), counter, tracker:
            gradients, shard = torch.zeros(4000), torch.zeros(1000)
            dist.reduce_scatter_tensor(shard, gradients)
            torch.zeros(1)
        peaks.append(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])
    assert peaks == [20004, 36000]


def test_hybrid_shards_gather_among_themselves_and_sum_over_replicas(parameters):
    found = trace("hsdp=2x4", 8)
    groups = {each.kind: each.ranks for each in found.sent}
    assert groups["allgather_base"] == (0, 1, 2, 3)
    assert groups["allreduce"] == (0, 4)
    assert sum_sent(found, "allreduce") == pytest.approx(4 * parameters / 4, rel=0.05)


@pytest.mark.parametrize("layout", ["replicated", "zero1"])
def test_replicas_keep_all_gradients_and_sum_them(layout, parameters):
    found = trace(layout, 4)
    assert sum_sent(found, "all_reduce") == pytest.approx(4 * parameters, rel=1e-3)
    share = 4 if layout == "zero1" else 1
    assert found.held_bytes == pytest.approx(8 * parameters + 8 * parameters / share, rel=0.25 if share > 1 else 0.02)


def test_a_frozen_model_has_weights_and_the_activations_of_a_layer(parameters):
    found, sharded = trace_frozen("replicated", 1), trace_frozen("fsdp=4", 4)
    assert found.held_bytes == pytest.approx(4 * parameters, rel=0.02)
    assert found.memory.get("gradients", 0) == found.memory.get("optimizer", 0) == 0
    assert found.peak < trace("replicated", 1).peak / 3
    trained = trace("replicated", 1).work.flops
    assert found.work.flops == pytest.approx(trained / 3, rel=0.1)  # attention's backward is 2.5 of it
    assert sharded.held_bytes == pytest.approx(4 * parameters / 4, rel=0.05)


def test_half_precision_halves_what_is_gathered_and_kept():
    plain = trace("fsdp=4", 4)
    with simulate_world(4):
        half = trace_step(Training(build, build_fake_batch, precision="bf16-mixed"), parse_layout("fsdp=4", 4))
    assert sum_sent(half, "allgather_base") == pytest.approx(sum_sent(plain, "allgather_base") / 2, rel=0.02)
    assert half.held_bytes == pytest.approx(plain.held_bytes, rel=0.01)
    assert half.peak < plain.peak


def test_weights_of_any_size_are_traced_without_memory():
    """A layer of 0.8 billion weights would take 3 GB."""
    wide = BertConfig(vocab_size=1000, hidden_size=8192, num_hidden_layers=2, num_attention_heads=64, num_labels=4,
                      intermediate_size=32768)  # fmt: skip
    with simulate_world(4):
        found = trace_query(
            Query(lambda: BertForSequenceClassification(wide), build_fake_batch), parse_layout("fsdp=4", 4)
        )
    assert found.held_bytes > 1.5e9


@pytest.mark.parametrize("measured", [("none", 11_789_825_536), ("full", 3_093_456_896)], ids=lambda each: each[0])
def test_the_predicted_peak_is_the_one_measured_on_a_gpu(measured):
    """Of BERT-base with its dropout, in bytes of torch's allocator on an H100: docs/benchmarks/gpu.md, 2026-11-27."""
    (checkpointing, expected), (rows, length) = measured, (64, 256)

    def draw() -> dict[str, torch.Tensor]:
        ids = torch.ones(rows, length, dtype=torch.long)
        labels = torch.zeros(rows, dtype=torch.long)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}

    training = Training(
        lambda: BertForSequenceClassification(BertConfig()), draw, train=TrainConfig(checkpointing=checkpointing)
    )
    with simulate_world(1):
        found = trace_step(training, parse_layout("replicated", 1))
    assert found.peak == pytest.approx(expected, rel=0.05)


def test_attention_with_dropout_keeps_all_pairs_of_tokens_on_a_cpu():
    with simulate_world(1):
        one, other = (
            trace_step(Training(build, build_fake_batch, backend=backend), parse_layout("replicated", 1))
            for backend in ("gloo", "nccl")
        )
    pairs = CONFIG.num_hidden_layers * ROWS * CONFIG.num_attention_heads * LENGTH**2
    assert one.memory["activations"] - other.memory["activations"] >= 2 * 4 * pairs
