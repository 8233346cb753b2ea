"""Tests that every optimizer trains with its usual rate and resumes from a checkpoint to the bit."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
)

from distill.errors import InputError
from distill.losses.config import LossConfig
from distill.train.apollo import Apollo
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from distill.train.muon import Muon, orthogonalize
from distill.train.optimizer import build_optimizer, group_parameters, set_dropout
from distill.train.optimizer_kinds import OPTIMIZERS
from distill.train.schedule import build_schedule
from pipelines.runs.training_checkpoint import load_training, save_training
from support.tiny_models import build_model
from unit.distill.train.test_module import TRAIN, data, quiet_trainer  # noqa: F401 - data is a fixture

LOW_BITS = ("adamw-8bit", "adamw-4bit", "adamw-fp8")  # their first step is compiled for half a minute
NAMES = [pytest.param(name, marks=pytest.mark.slow if name in LOW_BITS else ()) for name in OPTIMIZERS]


class Job(nn.Module):
    """A tiny student and its optimizer, which steps on drawn batches."""

    def __init__(self, name: str, **settings: Any):
        super().__init__()
        self.student: PreTrainedModel = build_model("bert", hidden_size=64, intermediate_size=128).train(False)
        self.config = TrainConfig(optimizer=name, warmup=0, **settings)
        self.optimizer: Optimizer = build_optimizer(self.student, [], self.config)

    def step(self, number: int) -> float:
        draw = torch.Generator().manual_seed(number % 4)
        ids = torch.randint(5, 50, (16, 12), generator=draw)
        logits = self.student(input_ids=ids).logits
        loss = nn.functional.cross_entropy(logits, ids[:, 0] % 2)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


def test_a_checkpoint_with_the_states_of_another_optimizer_is_rejected(tmp_path):
    job = Job("adamw")
    job.step(0)
    save_training(tmp_path / "checkpoint", job.student, [job.optimizer], {})
    other = Job("muon")
    with pytest.raises(InputError, match="found the states of another optimizer: training can't go on with this one"):
        load_training(tmp_path / "checkpoint", other.student, [other.optimizer])


def test_a_checkpoint_of_another_strategy_is_rejected(tmp_path):
    job = Job("adamw")
    with pytest.raises(InputError, match="expected training.pt, found none: the training began with another strategy"):
        load_training(tmp_path, job.student, [job.optimizer])


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_lowers_the_loss_at_a_multiple_of_its_usual_rate(name):
    torch.manual_seed(0)
    job = Job(name, learning_rate=10 * TrainConfig(optimizer=name).peak_rate)
    losses = [job.step(number) for number in range(40)]
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4]), losses


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_gives_the_weights_of_an_undisturbed_run(name, tmp_path):
    torch.manual_seed(0)
    job = Job(name, learning_rate=1e-3)
    initial = {key: value.clone() for key, value in job.student.state_dict().items()}
    for number in range(3):
        job.step(number)
    save_training(tmp_path / "checkpoint", job.student, [job.optimizer], {})
    for number in range(3, 6):
        job.step(number)
    resumed = Job(name, learning_rate=1e-3)
    resumed.student.load_state_dict(initial)
    load_training(tmp_path / "checkpoint", resumed.student, [resumed.optimizer])
    for number in range(3, 6):
        resumed.step(number)
    expected, found = job.student.state_dict(), resumed.student.state_dict()
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    assert any(not torch.equal(initial[key], value) for key, value in expected.items())


def test_a_checkpoint_has_no_states_of_parameters_without_gradients(tmp_path):
    job, resumed = Job("adamw"), Job("adamw")
    job.step(0)
    unused = next(job.student.parameters())
    del job.optimizer.state[unused]
    save_training(tmp_path / "checkpoint", job.student, [job.optimizer], {})
    load_training(tmp_path / "checkpoint", resumed.student, [resumed.optimizer])
    assert next(resumed.student.parameters()) not in resumed.optimizer.state
    assert len(resumed.optimizer.state) == len(job.optimizer.state)
    assert all(parameter.grad is None for parameter in resumed.student.parameters())


@pytest.mark.parametrize(("name", "rate"), [("adamw", 1e-4), ("sgd", 1e-2), ("lion", 2e-5)])
def test_an_omitted_learning_rate_is_the_optimizers_usual_one(name, rate):
    assert TrainConfig(optimizer=name).peak_rate == pytest.approx(rate)
    assert TrainConfig(optimizer=name).resolve(5e-4).learning_rate == pytest.approx(5 * rate)
    assert TrainConfig(optimizer=name, learning_rate=7.0).resolve(5e-4).learning_rate == 7.0


def test_an_unknown_optimizer_is_rejected_with_the_nearest_name():
    with pytest.raises(InputError, match=r"expected adamw, adam, .*found 'adamw8bit'; did you mean adamw-8bit\?"):
        TrainConfig(optimizer="adamw8bit")


def test_a_decaying_schedule_is_rejected_with_schedule_free():
    with pytest.raises(InputError, match="train.schedule: expected constant .* found cosine"):
        TrainConfig(optimizer="schedule-free", schedule="cosine")
    config = TrainConfig(optimizer="schedule-free", warmup=0)
    schedule = build_schedule(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0), config, 10)
    assert [schedule.lr_lambdas[0](step) for step in (0, 5, 9)] == [1.0] * 3


def test_schedule_free_validates_and_ends_with_averaged_weights(data):  # noqa: F811
    train = replace(TRAIN, optimizer="schedule-free", schedule="auto")
    module = DistillationModule(build_model("bert"), loss=LossConfig(kl=0, ce=1), train=train)
    weight = module.student.classifier.weight
    seen: dict[str, list[Tensor]] = {"trained": [], "validated": []}

    class Record(Callback):
        def on_validation_batch_start(self, trainer, pl_module, *rest: Any) -> None:
            seen["validated"].append(weight.detach().clone())

        def on_train_batch_start(self, trainer, pl_module, *rest: Any) -> None:
            seen["trained"].append(weight.detach().clone())

    quiet_trainer(max_epochs=2, num_sanity_val_steps=0, callbacks=[Record()]).fit(module, datamodule=data)
    assert torch.equal(weight, seen["validated"][-1])
    assert not any(torch.equal(one, other) for one in seen["validated"] for other in seen["trained"])


def test_muon_orthogonalizes_matrices_of_layers_only():
    student = build_model("bert")
    groups = group_parameters(student, [], TrainConfig(optimizer="muon"))
    names = {id(parameter): name for name, parameter in student.named_parameters()}
    matrices = {names[id(p)] for group in groups if group["matrices"] for p in group["params"]}
    assert matrices == {
        name for name in names.values() if "encoder.layer" in name and name.endswith(".weight") and "Norm" not in name
    }
    assert sum(len(group["params"]) for group in groups) == len(names)


@pytest.mark.parametrize("shape", [(48, 48), (16, 80), (80, 16)])
def test_an_orthogonalized_matrix_has_the_same_singular_vectors_and_values_of_about_one(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    orthogonal = orthogonalize(matrix)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    values = left.T @ orthogonal @ right.T
    assert values.diagonal().min() > 0.4
    assert values.diagonal().max() < 1.3
    assert (values - values.diagonal().diag()).abs().max() < 1e-3


def test_muon_is_torchs_muon_on_matrices_and_adamw_on_the_rest():
    torch.manual_seed(0)
    start = [torch.randn(24, 40), torch.randn(40)]
    gradients = [[torch.randn_like(each) for each in start] for _ in range(4)]

    def train(make) -> list[Tensor]:
        parameters = [nn.Parameter(each.clone()) for each in start]
        optimizers = make(parameters)
        for step in gradients:
            for parameter, gradient in zip(parameters, step, strict=True):
                parameter.grad = gradient.clone()
            for optimizer in optimizers:
                optimizer.step()
        return [parameter.detach() for parameter in parameters]

    def ours(parameters: list[nn.Parameter]) -> list[Optimizer]:
        groups = [{"params": parameters[:1], "matrices": True}, {"params": parameters[1:]}]
        return [Muon(groups, lr=0.01)]

    def theirs(parameters: list[nn.Parameter]) -> list[Optimizer]:
        muon = torch.optim.Muon(parameters[:1], lr=0.01, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
        return [muon, torch.optim.AdamW(parameters[1:], lr=0.01)]

    found, expected = train(ours), train(theirs)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=2e-3)  # theirs computes in bfloat16
    torch.testing.assert_close(found[1], expected[1])


def test_apollo_keeps_moments_of_the_projection_only():
    job = Job("apollo")
    job.step(0)
    for group in job.optimizer.param_groups:
        for parameter in group["params"]:
            state = job.optimizer.state.get(parameter, {})
            if state and group["matrices"]:
                assert state["exp_avg"].numel() == 32 * max(parameter.shape)
            elif state:
                assert state["exp_avg"].shape == parameter.shape


def test_apollo_with_matrices_as_small_as_its_rank_is_adamw():
    torch.manual_seed(0)
    first, second = (nn.Parameter(torch.ones(8, 20)) for _ in range(2))
    ours = Apollo([{"params": [first], "matrices": True}], lr=0.01)
    theirs = torch.optim.AdamW([second], lr=0.01)
    for _ in range(5):
        first.grad = torch.randn(8, 20)
        second.grad = first.grad.clone()
        ours.step()
        theirs.step()
    torch.testing.assert_close(first, second)


def test_apollo_goes_on_after_a_step_without_a_gradient():
    torch.manual_seed(0)
    weight = nn.Parameter(torch.ones(40, 50))
    optimizer = Apollo([{"params": [weight], "matrices": True}], lr=0.01)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    before = weight.detach().clone()
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    assert (weight - before).abs().mean() > 1e-3


@pytest.mark.parametrize("family", ["opt", "modernbert", "llama"])
def test_dropout_of_functions_is_set_too(family):
    model = build_functional_dropout(family).train()
    ids = torch.arange(2, 10)[None]
    with torch.no_grad():
        assert not torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
        set_dropout(model, 0)
        assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)


def build_functional_dropout(family: str) -> PreTrainedModel:
    """Returns a tiny model of a family whose dropout is partly without layers."""
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "pad_token_id": 0}
    if family == "opt":
        return OPTForCausalLM(OPTConfig(**sizes, ffn_dim=64, word_embed_proj_dim=32, dropout=0.3))
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=64, attention_dropout=0.3))
    config = ModernBertConfig(**sizes, intermediate_size=64, attention_dropout=0.3)
    return ModernBertForSequenceClassification(config)


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr("distill.train.optimizer_kinds.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"expected the package pytorch-optimizer.*'\.\[optimizers\]'"):
        Job("lion")


@pytest.mark.parametrize(("name", "usual"), [("adamw", 0.01), ("sgd", 0.01), ("adam", 0.0), ("rmsprop", 0.0)])
def test_a_weight_decay_that_gradients_would_divide_is_used_on_request_only(name, usual):
    model = build_model("bert", num_hidden_layers=1)
    for config, wanted in ((TrainConfig(optimizer=name), usual), (TrainConfig(optimizer=name, weight_decay=0.1), 0.1)):
        decays = {group["weight_decay"] for group in build_optimizer(model, [], config).param_groups}
        assert decays == {wanted, 0.0}
        assert config.resolve().weight_decay == wanted
