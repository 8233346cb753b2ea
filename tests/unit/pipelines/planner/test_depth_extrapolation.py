"""Deep models are extrapolated from shallow ones, to what their own trace says."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from distill.parallel.layout import parse_layout
from distill.train.config import TrainConfig
from pipelines.planner.depth_extrapolation import extrapolate_depth
from pipelines.planner.fake_process_group import simulate_world
from pipelines.planner.trace import StepTrace, Training, trace_step


def trace_decoder(layers: int, layout: str, checkpointing: str) -> StepTrace:
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=256,
        use_cache=False,
    )  # fmt: skip

    def build_fake_batch() -> dict[str, torch.Tensor]:
        ids = torch.ones(2, 64, dtype=torch.long)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}

    training = Training(
        lambda: LlamaForCausalLM(config), build_fake_batch, train=TrainConfig(checkpointing=checkpointing)
    )
    return trace_step(training, parse_layout(layout, 4))


@pytest.mark.parametrize("checkpointing", [pytest.param("none", marks=pytest.mark.slow), "full"])
@pytest.mark.parametrize(
    "layout",
    [
        "fsdp=4",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("replicated", "dp=2,tp=2", "tp=2,fsdp=2", "zero2")),
    ],
)
def test_an_extrapolation_to_twelve_layers_equals_their_full_trace(layout, checkpointing):
    with simulate_world(4):
        traced = trace_decoder(12, layout, checkpointing)
        parsed = parse_layout(layout, 4)
        extrapolated = extrapolate_depth(lambda layers: trace_decoder(layers, layout, checkpointing), 12, parsed).whole
    assert extrapolated.held_bytes == pytest.approx(traced.held_bytes, rel=0.01)
    assert extrapolated.peak == pytest.approx(traced.peak, rel=0.03)
    assert extrapolated.work.flops == pytest.approx(traced.work.flops, rel=0.01)
    assert extrapolated.work.bytes_accessed == pytest.approx(traced.work.bytes_accessed, rel=0.01)
    assert extrapolated.work.sharded == pytest.approx(traced.work.sharded, rel=0.01)
    assert extrapolated.work.drawn == traced.work.drawn
    assert sum(extrapolated.sent.values()) == pytest.approx(sum(traced.sent.values()), rel=0.02)
