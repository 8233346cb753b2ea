"""Tests that the fused loss on sampled or top-k signals equals the loss on the student's logits up to rounding."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from distill.cache import CacheReader, Identity, Sampled, TopK, write_cache
from distill.cache.samples import build_samples
from distill.data.batches.packing import PackedRows
from distill.data.batches.token_blocks import LanguageBlocks
from distill.data.masking.config import MaskConfig
from distill.data.masking.masks import MaskedBlocks
from distill.losses.config import LossConfig
from distill.teacher.online import OnlineTeacher
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from distill.train.steps.fused import FusedTerm, returns_head_output
from support.tiny_models import build_model

VOCABULARY_SIZE, TEMPERATURE = 60, 2.0
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
SIZES |= {"max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LOSS = LossConfig(kl=1, temperature=TEMPERATURE)


def build(family: str, rows: int = VOCABULARY_SIZE, **changes: Any) -> PreTrainedModel:
    kind = {
        "llama": transformers.LlamaForCausalLM,
        "gpt2": transformers.GPT2LMHeadModel,
        "gemma2": transformers.Gemma2ForCausalLM,
        "granite": transformers.GraniteForCausalLM,
        "cohere": transformers.CohereForCausalLM,
        "bert": transformers.BertForMaskedLM,
        "modernbert": transformers.ModernBertForMaskedLM,
    }[family]
    more = {
        "gemma2": {"head_dim": 8, "num_key_value_heads": 2},
        "modernbert": {"cls_token_id": 1, "sep_token_id": 2},
    }.get(family, {})
    torch.manual_seed(rows)
    model = kind(kind.config_class(vocab_size=rows, **(SIZES | more | changes)))
    for name, weights in model.named_parameters():
        if weights.dim() > 1 or name.endswith("decoder.bias"):
            torch.nn.init.normal_(weights, std=0.3)
    return model.eval()


def rows_of(family: str) -> Any:
    rng = np.random.default_rng(0)
    plain = LanguageBlocks([rng.integers(5, VOCABULARY_SIZE, length) for length in (9, 7, 9, 3)])
    if family not in ("bert", "modernbert"):
        return PackedRows(plain, [np.array([0, 1]), np.array([3, 2])])
    return MaskedBlocks(plain, MaskConfig(rate=0.4), 4, VOCABULARY_SIZE, tuple(range(5)))


def cached(kind: str, rows: Any, teacher: PreTrainedModel, folder: Path) -> CacheReader:
    signals = {
        "sampled": Sampled(64, draws=9, temperature=TEMPERATURE),
        "topk": TopK(64, k=12, temperature=TEMPERATURE),
    }
    identity = Identity("t", "t", (signals[kind],))
    write_cache(folder, identity, build_samples(rows, 0), OnlineTeacher(teacher))
    return CacheReader(folder, identity)


def loss_and_gradients(module: DistillationModule, batch: dict, half: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    module.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16) if half else nullcontext():
        loss = module.training_step(batch, 0)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def check_gradients(found: dict[str, Tensor], expected: dict[str, Tensor], half: bool) -> None:
    assert found.keys() == expected.keys()
    whole = torch.stack([value.norm() for value in expected.values()]).norm()
    for name, value in expected.items():
        error = (found[name] - value).norm()
        assert error < (5e-2 if half else 1e-4) * value.norm() + (1e-3 if half else 1e-6) * whole, name


@pytest.fixture
def with_logits(monkeypatch):
    """Returns a function that calls another with the fused loss disabled, so that logits are computed."""

    def run(call, *args: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(FusedTerm, "can_fuse", lambda *_: False)
            return call(*args)

    return run


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("kind", ["sampled", "topk"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "modernbert"])
def test_the_fused_loss_gives_the_loss_and_gradients_of_the_loss_on_logits(family, kind, half, with_logits, tmp_path):
    rows = rows_of(family)
    signals = cached(kind, rows, build(family, 64), tmp_path / "c")
    module = DistillationModule(build(family), loss=LOSS, train=TrainConfig(dropout=0), signals=signals)
    batch = rows.collate(range(len(rows)), 0)
    assert module.fused_term.can_fuse(batch, signals(batch))
    loss, found = loss_and_gradients(module, batch, half)
    expected_loss, expected = with_logits(loss_and_gradients, module, batch, half)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-2 if half else 1e-5, atol=1e-6)
    check_gradients(found, expected, half)


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_the_fused_label_loss_gives_the_loss_and_gradients_of_the_loss_on_logits(family, half, with_logits):
    """The last label of each row is missing, as that of a text's last token is."""
    rows = rows_of(family)
    module = DistillationModule(build(family), loss=LossConfig(kl=0, ce=1), train=TrainConfig(dropout=0))
    batch = rows.collate(range(len(rows)), 0)
    assert module.fused_term.can_fuse(batch, {})
    loss, found = loss_and_gradients(module, batch, half)
    expected_loss, expected = with_logits(loss_and_gradients, module, batch, half)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-2 if half else 1e-5, atol=1e-6)
    check_gradients(found, expected, half)


def test_gradients_of_weighted_rows_are_not_fused():
    module = DistillationModule(build("llama"), loss=LossConfig(kl=0, ce=1), train=TrainConfig(dropout=0))
    batch = rows_of("llama").collate(range(2), 0)
    loss, plain = loss_and_gradients(module, batch)
    weighed_loss, weighed = loss_and_gradients(module, batch | {"row_weights": torch.tensor([2.0, 2.0])})
    torch.testing.assert_close(weighed_loss, loss)
    check_gradients(weighed, {name: 2 * value for name, value in plain.items()}, half=False)


def test_a_batch_without_labels_gives_no_loss_and_no_gradients():
    module = DistillationModule(build("llama"), loss=LossConfig(kl=0, ce=1), train=TrainConfig(dropout=0))
    batch = rows_of("llama").collate(range(2), 0)
    loss, gradients = loss_and_gradients(module, batch | {"labels": torch.full_like(batch["labels"], -100)})
    assert loss == 0
    assert all(not gradient.any() for gradient in gradients.values())


def test_tags_are_not_fused_because_their_logits_are_narrower_than_the_heads_input():
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=VOCABULARY_SIZE, **SIZES, num_labels=5)
    module = DistillationModule(
        transformers.BertForTokenClassification(config), loss=LossConfig(kl=0, ce=1), train=TrainConfig()
    )
    batch = rows_of("bert").collate(range(2), 0)
    assert not module.fused_term.can_fuse(batch, {})


def test_the_fused_loss_with_a_hidden_term_gives_the_terms_computed_with_logits(with_logits, tmp_path):
    rows, teacher = rows_of("llama"), build("llama", 64)
    signals = cached("sampled", rows, teacher, tmp_path / "c")
    states = OnlineTeacher(teacher, ("hidden",))
    loss = LossConfig(kl=1, hidden=0.5, temperature=TEMPERATURE)
    module = DistillationModule(
        build("llama"),
        loss=loss,
        train=TrainConfig(dropout=0),
        signals=lambda batch: signals(batch) | {"hidden": states(batch)["hidden"]},
        teacher_sizes=(2, 16),
    )
    batch = rows.collate(range(2), 0)
    found, expected = module.compute_terms(batch), with_logits(module.compute_terms, batch)
    assert list(found) == list(expected) == ["kl", "hidden"]
    torch.testing.assert_close(found, expected)


def test_the_fused_loss_computes_no_logits_unless_the_head_has_hooks(tmp_path):
    rows = rows_of("llama")
    signals = cached("sampled", rows, build("llama", 64), tmp_path / "c")
    module = DistillationModule(build("llama"), loss=LOSS, train=TrainConfig(dropout=0), signals=signals)
    batch, shapes = rows.collate(range(2), 0), []
    module.compute_terms(batch)
    module.student.lm_head.register_forward_hook(lambda _, args, output: shapes.append(output.shape))
    module.compute_terms(batch)
    assert [shape[0] for shape in shapes] == [28]  # a head with hooks is called as usual
    module.student.lm_head._forward_hooks.clear()
    module.student.register_forward_hook(lambda _, args, output: shapes.append(output.logits.shape))
    module.compute_terms(batch)
    assert shapes[1:] == [(0, VOCABULARY_SIZE)]


@pytest.mark.parametrize(
    ("family", "changes", "plain"),
    [
        ("llama", {}, True),
        ("bert", {}, True),
        ("gemma2", {"final_logit_softcapping": None}, True),
        ("gemma2", {"final_logit_softcapping": 5.0}, False),
        ("granite", {"logits_scaling": 3.0}, False),
        ("cohere", {"logit_scale": 0.3}, False),
    ],
)
def test_scaled_or_soft_capped_logits_are_detected_without_side_effects(family, changes, plain):
    model, batch = build(family, **changes).train(), rows_of("bert").collate(range(4), 0)
    state = torch.get_rng_state()
    assert returns_head_output(model, batch) is plain
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in model.modules())
    assert not model.get_output_embeddings()._forward_pre_hooks


@pytest.mark.parametrize(
    ("loss", "signals"),
    [
        (LossConfig(kl=1, ce=1), ("ids", "weights")),
        (LossConfig(kl=1), ("logits",)),
    ],
)
def test_losses_that_read_logits_are_not_fused(loss, signals):
    batch = rows_of("llama").collate(range(2), 0)
    module = DistillationModule(build("llama"), loss=loss, train=TrainConfig())
    assert not module.fused_term.can_fuse(batch, dict.fromkeys(signals))


def test_float16_autocast_and_classifiers_are_not_fused(token_batch):
    module = DistillationModule(build("llama"), loss=LOSS, train=TrainConfig())
    signals = dict.fromkeys(("ids", "weights"))
    batch = rows_of("llama").collate(range(2), 0)
    with torch.autocast("cpu", torch.float16):
        assert not module.fused_term.can_fuse(batch, signals)
    assert module.fused_term.can_fuse(batch, signals)
    classes = DistillationModule(build_model("bert"), loss=LOSS, train=TrainConfig())
    assert not classes.fused_term.can_fuse(token_batch, signals)
