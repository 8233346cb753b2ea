import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForSequenceClassification, BertConfig, LlamaConfig, MistralConfig, ModernBertConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from distill.models.short_attention import MOST_TOKENS, attend, attend_by_products, attend_to_short_texts
from distill.train.activation_checkpointing import checkpoint_layers

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "vocab_size": 64, "pad_token_id": 0}
CONFIGS = {
    "bert": BertConfig(**SIZES, num_attention_heads=4),
    "modernbert": ModernBertConfig(**SIZES, num_attention_heads=4, bos_token_id=1, eos_token_id=2, cls_token_id=1),
    "llama with shared keys": LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2),
    "mistral with a window": MistralConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, sliding_window=4),
}


def build_model(name):
    torch.manual_seed(0)
    config = CONFIGS[name]
    config._attn_implementation = "sdpa"
    model = AutoModelForSequenceClassification.from_config(config)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model.train()


def draw_inputs(*, padded):
    torch.manual_seed(1)
    ids, mask = torch.randint(3, 64, (4, 12)), torch.ones(4, 12, dtype=torch.long)
    if padded:
        mask[1, 7:] = mask[3, 2:] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def run_pass(model, inputs):
    """Returns logits and gradients of a pass in bfloat16."""
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(**inputs).logits.float()
    logits.square().sum().backward()
    return logits.detach(), [each.grad.clone() for each in model.parameters() if each.grad is not None]


def draw_heads(length=12, dtype=torch.bfloat16):
    torch.manual_seed(2)
    return [torch.randn(2, 3, length, 8, dtype=dtype).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("padded", [False, True], ids=["whole rows", "padding"])
@pytest.mark.parametrize("name", CONFIGS)
def test_outputs_and_gradients_of_a_model_are_those_of_fused_attention(name, padded, monkeypatch):
    model, inputs = build_model(name), draw_inputs(padded=padded)
    expected, expected_gradients = run_pass(model, inputs)
    calls = []
    monkeypatch.setattr(
        "distill.models.short_attention.attend_by_products",
        lambda *args: calls.append(1) or attend_by_products(*args),
    )
    with attend_to_short_texts():
        found, gradients = run_pass(model, inputs)
    assert len(calls) == 2
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    for one, other in zip(gradients, expected_gradients, strict=True):
        assert (one - other).norm() <= 0.03 * other.norm() + 1e-3


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_layers_that_are_computed_again_attend_in_the_same_way(mode):
    model, inputs = build_model("bert"), draw_inputs(padded=True)
    with attend_to_short_texts():
        expected, expected_gradients = run_pass(model, inputs)
        with checkpoint_layers(model, mode):
            found, gradients = run_pass(model, inputs)
    assert torch.equal(found, expected)
    assert all(torch.equal(one, other) for one, other in zip(gradients, expected_gradients, strict=True))


@pytest.mark.parametrize("added", [False, True], ids=["boolean", "added"])
def test_products_attend_to_the_keys_of_the_mask(added):
    query, key, value = draw_heads(dtype=torch.float32)
    mask = torch.rand(2, 1, 12, 12) > 0.5
    mask[..., 0] = True
    form = torch.where(mask, 0.0, -torch.inf) if added else mask
    found = attend_by_products(query, key, value, form, 0.3)
    expected = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3)
    torch.testing.assert_close(found, expected)


def test_a_query_without_keys_attends_to_all():
    query, key, value = draw_heads()
    output = attend_by_products(query, key, value, torch.zeros(2, 1, 12, 12, dtype=torch.bool), 0.3)
    torch.testing.assert_close(output, value.mean(2, keepdim=True).expand_as(output), rtol=0.02, atol=0.02)


def test_dropout_leaves_out_keys_at_its_rate():
    query, key = torch.zeros(2, 4, 8, 32, 16)
    value = torch.ones(4, 8, 32, 16)
    torch.manual_seed(0)
    output = attend_by_products(query, key, value, None, 1.0, 0.25)
    assert output.std() > 0.05
    assert abs(float(output.mean()) - 1) < 0.02


@pytest.mark.parametrize(
    ("length", "dtype"), [(MOST_TOKENS + 1, torch.bfloat16), (12, torch.float32)], ids=["long", "float32"]
)
def test_fused_attention_is_left_where_it_is_faster(length, dtype, monkeypatch):
    monkeypatch.setattr("distill.models.short_attention.attend_by_products", None)
    output, _ = attend(torch.nn.Module(), *draw_heads(length, dtype), None, is_causal=False)
    assert output.shape == (2, length, 3, 8)


def test_the_context_restores_the_attention_function():
    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    with attend_to_short_texts():
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is attend
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is before
