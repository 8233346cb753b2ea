"""Tests that checkpointed layers keep less for the backward pass and give the same losses and gradients."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.memory.activations import measure_peak
from distill.checkpoint.layers import find_layer_names
from distill.checkpoint.outputs import read_logits
from distill.errors import InputError
from distill.losses.config import LossConfig
from distill.models.attention import capture_attention_vectors
from distill.train.activation_checkpointing import checkpoint_layers
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from distill.train.steps.plain import run_student
from support.tiny_models import build_model
from unit.distill.train.test_module import TRAIN, data, quiet_trainer  # noqa: F401 - data is a fixture

VOCABULARY_SIZE = 50
SIZES = {"vocab_size": VOCABULARY_SIZE, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 256, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {"hidden_dropout_prob": 0.1},
    "distilbert": {"dim": 64, "n_layers": 4, "n_heads": 4, "hidden_dim": 256, "dropout": 0.1},
    "mobilebert": {"embedding_size": 32, "intra_bottleneck_size": 32, "hidden_dropout_prob": 0.1},
    "modernbert": {"cls_token_id": 1, "sep_token_id": 2, "eos_token_id": 2, "mlp_dropout": 0.1},
    "llama": {"attention_dropout": 0.1},
    "gpt2": {"resid_pdrop": 0.1},
    "qwen3": {"head_dim": 16, "num_key_value_heads": 4, "attention_dropout": 0.1},
}


def build_body(family: str, attention: str = "sdpa") -> PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **(SIZES | FAMILIES[family]))
    config.use_cache = False
    return transformers.AutoModel.from_config(config, attn_implementation=attention).train()


def draw_batch(rows: int = 4, length: int = 32) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY_SIZE, (rows, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, length // 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def compute_gradients(model: PreTrainedModel, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    torch.manual_seed(1)  # of the dropout
    loss = model(**batch).last_hidden_state.square().mean()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def count_calls(model: PreTrainedModel) -> list[int]:
    """Returns a list that counts the calls of a module within the first layer."""
    calls = [0]
    layer = model.get_submodule(find_layer_names(model)[0])
    norm = next(module for module in layer.modules() if "Norm" in type(module).__name__)
    norm.register_forward_pre_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    return calls


@pytest.mark.parametrize("mode", ["full", "selective", "every=2"])
@pytest.mark.parametrize(
    ("family", "attention"), [*((family, "sdpa") for family in FAMILIES), ("bert", "eager"), ("llama", "eager")]
)
def test_gradients_with_dropout_equal_the_plain_steps_to_the_bit(family, attention, mode):
    model, batch = build_body(family, attention), draw_batch()
    loss, expected = compute_gradients(model, batch)
    names, calls = [name for name, _ in model.named_modules()], count_calls(model)
    with checkpoint_layers(model, mode):
        found_loss, found = compute_gradients(model, batch)
        assert [name for name, _ in model.named_modules()] == names
        assert not model.state_dict().keys() ^ build_body(family, attention).state_dict().keys()
    assert calls == [2], "the layer was not computed again"
    assert torch.equal(found_loss, loss)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    compute_gradients(model, batch)
    assert calls == [3]
    assert not any("forward" in vars(module) for module in model.modules()), "layers are as before"


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_decoder_that_keeps_keys_by_default_is_trained_with_checkpointed_layers(mode):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(SIZES | FAMILIES["llama"]))).train()
    assert model.config.use_cache

    def compute(mode: str) -> dict[str, Tensor]:
        model.zero_grad()
        torch.manual_seed(1)
        with checkpoint_layers(model, mode):
            read_logits(run_student(model, draw_batch())).square().mean().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected, found = compute("none"), compute(mode)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_full_checkpointing_keeps_less_than_selective_and_selective_less_than_none():
    batch = draw_batch(8, 128)

    def peak(mode: str) -> int:
        model = build_body("bert")
        with checkpoint_layers(model, mode):
            compute_gradients(model, batch)
            return measure_peak(lambda: compute_gradients(model, batch))

    none, selective, every, full = (peak(mode) for mode in ("none", "selective", "every=2", "full"))
    assert full < 0.45 * none
    assert full < selective < 0.7 * none
    assert full < every < 0.75 * none


def test_every_third_layer_is_computed_again():
    model = build_body("bert")
    names = find_layer_names(model)
    with checkpoint_layers(model, "every=3"):
        changed = [number for number, name in enumerate(names) if "forward" in vars(model.get_submodule(name))]
    assert changed == [0, 3]


def test_a_pass_without_gradients_computes_layers_once():
    model, batch = build_body("bert"), draw_batch()
    calls = count_calls(model)
    with checkpoint_layers(model, "full"), torch.no_grad():
        model(**batch)
    assert calls == [1]


def test_a_copy_of_a_checkpointed_model_computes_with_its_own_weights():
    model, batch = build_body("bert").eval(), draw_batch()
    with checkpoint_layers(model, "full"):
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for weight in twin.parameters():
                weight.zero_()
        assert twin(**batch).last_hidden_state.abs().max() == 0
        assert model(**batch).last_hidden_state.abs().max() > 0


def test_hooks_of_a_layer_run_once():
    model, batch = build_body("bert"), draw_batch()
    runs: list[None] = []
    model.encoder.layer[1].register_forward_hook(lambda *_: runs.append(None))
    with checkpoint_layers(model, "full"):
        compute_gradients(model, batch)
    assert len(runs) == 1


def test_captured_attention_vectors_have_the_gradients_of_the_plain_step():
    model, batch = build_body("bert"), draw_batch()

    def compute() -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(1)
        with capture_attention_vectors(model) as captured:
            model(**batch)
            loss = sum(vector.square().mean() for layer in captured for vector in layer)
        loss.backward()
        return [p.grad.clone() for p in model.encoder.parameters() if p.grad is not None]

    expected = compute()
    for mode in ("full", "selective"):
        with checkpoint_layers(model, mode):
            assert all(torch.equal(found, value) for found, value in zip(compute(), expected, strict=True))


def test_a_model_without_a_list_of_layers_is_rejected():
    config = transformers.AlbertConfig(vocab_size=50, embedding_size=16, hidden_size=32, num_attention_heads=4)
    with (
        pytest.raises(InputError, match="expected a list of 12 layers, found none"),
        checkpoint_layers(transformers.AlbertModel(config), "full"),
    ):
        pass


@pytest.mark.parametrize("mode", ["half", "every=0", "every=", ""])
def test_an_unknown_mode_is_rejected(mode):
    with pytest.raises(InputError, match="train.checkpointing: expected none, full, selective, every=K or auto, found"):
        TrainConfig(checkpointing=mode)


def test_a_module_checkpoints_its_student_while_it_fits(data):  # noqa: F811
    student = build_model("bert")
    train = replace(TRAIN, checkpointing="full")
    module, calls = DistillationModule(student, loss=LossConfig(kl=0, ce=1), train=train), count_calls(student)
    quiet_trainer(max_steps=1, limit_val_batches=0).fit(module, datamodule=data)
    assert calls == [2]
    assert not any("forward" in vars(each) for each in student.modules())
