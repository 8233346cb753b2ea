"""Tests of logits restricted to requested positions, and of the temperature of cached distributions."""

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
)

from distill.errors import InputError
from distill.losses.compose import distribution_loss
from distill.losses.config import LossConfig
from distill.models.output_head import restrict_logits
from distill.tasks.logit_rows import flatten_rows
from distill.teacher.online import OnlineTeacher
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from support.tiny_models import VOCABULARY, build_model

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def decoder_of(family: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if family == "gpt2":
        return GPT2LMHeadModel(GPT2Config(vocab_size=len(VOCABULARY), n_embd=32, n_layer=2, n_head=4)).eval()
    if family == "modernbert":
        return ModernBertForMaskedLM(ModernBertConfig(vocab_size=len(VOCABULARY), pad_token_id=0, **SMALL)).eval()
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(VOCABULARY), **SMALL)).eval()


def batch_of(positions: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[1, 6:] = 0
    batch = {"input_ids": torch.randint(5, len(VOCABULARY), (3, 9)) * mask, "attention_mask": mask}
    return batch | ({"positions": torch.rand(3, 9) < 0.3} if positions else {})


@pytest.mark.parametrize("positions", [True, False])
@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "electra", "modernbert", "llama", "gpt2"])
def test_logits_at_requested_positions_equal_those_of_the_full_forward(family, positions):
    encoder = family in ("bert", "roberta", "distilbert", "electra")
    model = build_model(family, "ForMaskedLM") if encoder else decoder_of(family)
    batch = batch_of(positions)
    inputs = {name: value for name, value in batch.items() if name != "positions"}
    full = flatten_rows(batch, model(**inputs).logits, 2)
    with restrict_logits(model, batch):
        restricted = model(**inputs).logits
    assert restricted.shape == full.shape
    torch.testing.assert_close(restricted, full, rtol=1e-5, atol=1e-6)
    assert model(**inputs).logits.dim() == 3  # outside the context the logits cover all positions again


@pytest.mark.parametrize("hidden", [True, False])
def test_a_teacher_returns_logits_at_requested_positions_only_and_hidden_states_everywhere(hidden):
    model, batch = build_model("bert", "ForMaskedLM"), batch_of(True)
    outputs = ("logits", "hidden") if hidden else ("logits",)
    everywhere = {**batch, "positions": batch["attention_mask"]}
    signals, full_signals = (OnlineTeacher(model, outputs)(each) for each in (batch, everywhere))
    requested = batch["positions"] & batch["attention_mask"].bool()
    everything = torch.zeros(3, 9, full_signals["logits"].shape[-1])
    everything[batch["attention_mask"].bool()] = full_signals["logits"]
    torch.testing.assert_close(signals["logits"], everything[requested], rtol=1e-5, atol=1e-6)
    assert len(signals["logits"]) == requested.sum() < batch["attention_mask"].sum()
    if hidden:
        assert signals["hidden"][-1].shape[:2] == (3, 9), "a teacher's layers are read at every token"


def test_gradients_through_the_requested_positions_equal_those_of_the_full_forward():
    model, batch = build_model("bert", "ForMaskedLM"), batch_of(True)
    inputs = {name: value for name, value in batch.items() if name != "positions"}
    gradients = []
    for restricted in (False, True):
        model.zero_grad()
        if restricted:
            with restrict_logits(model, batch):
                rows = model(**inputs).logits
        else:
            rows = flatten_rows(batch, model(**inputs).logits, 2)
        rows.logsumexp(-1).sum().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_the_restriction_to_requested_positions_ends_when_the_body_raises():
    model, batch = build_model("bert", "ForMaskedLM"), batch_of(True)
    with pytest.raises(ZeroDivisionError), restrict_logits(model, batch):
        raise ZeroDivisionError
    assert model(input_ids=batch["input_ids"]).logits.dim() == 3


def test_a_classifiers_logits_are_unaffected():
    model, batch = build_model("bert"), batch_of(False)
    with restrict_logits(model, batch):
        assert model(**batch).logits.shape == (3, 5)


def test_the_label_loss_of_a_masked_language_student_counts_labelled_positions_only():
    model, batch = build_model("bert", "ForMaskedLM"), batch_of(True)
    batch["labels"] = torch.where(batch["positions"], batch["input_ids"], -100)
    batch["labels"][1, 6:] = -100
    module = DistillationModule(model, loss=LossConfig(kl=0, ce=1), train=TrainConfig())
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    expected = torch.nn.functional.cross_entropy(model(**inputs).logits.transpose(1, 2), batch["labels"])
    torch.testing.assert_close(module.compute_terms(batch)["ce"], expected)


@pytest.mark.parametrize("kind", ["topk", "sampled"])
def test_the_loss_on_a_cached_distribution_uses_its_temperature_and_rejects_another(kind):
    torch.manual_seed(2)
    student, teacher = torch.randn(4, 11, dtype=torch.float64), torch.randn(4, 11, dtype=torch.float64)
    soft = (teacher / 3).softmax(-1)
    ids = torch.arange(11).repeat(4, 1)
    signals = {"ids": ids, "temperature": 3.0}
    signals |= {"weights": soft} if kind == "sampled" else {"log_probs": soft.log(), "tail": torch.zeros(4).double()}
    found = distribution_loss(student, signals, 3.0)
    log_q = (student / 3).log_softmax(-1)
    cross = -(soft * log_q).sum(-1).mean() * 9
    expected = cross if kind == "sampled" else cross + (soft * soft.log()).sum(-1).mean() * 9
    torch.testing.assert_close(found, expected)
    with pytest.raises(InputError, match=r"expected 3.0, found 2.0"):
        distribution_loss(student, signals, 2.0)
