"""Training of a model together with slices of its weights."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import lightning
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from distill.data.batches.data_module import TextDataModule
from distill.data.batches.encode import Batch
from distill.losses.compose import weighted_sum
from distill.losses.config import LossConfig
from distill.slicing import Shape, prune
from distill.tasks.text_classification import TextClassification
from distill.teacher.online import OnlineTeacher
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from distill.train.nested import NestedModule, measure_work
from pipelines.runs.console import Console
from pipelines.runs.manifest import LOGS, SCRATCH
from pipelines.runs.memory.plan import FILE as PLAN_FILE
from pipelines.runs.memory.step_cost import measure_in_training
from pipelines.runs.trainer import fit_module
from pipelines.runs.training_job import TrainingJob
from pipelines.runs.training_logs import RANGE_TEST
from support.interrupted_training import BASE as LONGER
from support.interrupted_training import LABELS, MACHINE, SPLITS, Killed, killed_at
from support.pruning_axes import tiny_model_with_axes

SHAPES = (
    Shape((0, 2), {"hidden": torch.arange(0, 32, 2), "layers.0.ffn": torch.arange(30)}),
    Shape((2,), {"hidden": torch.arange(0, 32, 4), "layers.2.heads": torch.tensor([1])}),
)
LOSS = LossConfig(kl=1, temperature=2)
BASE = replace(LONGER, epochs=1)


def build_module(**settings: object) -> NestedModule:
    student, axes = tiny_model_with_axes("bert")
    teacher, _ = tiny_model_with_axes("bert")
    options = {"shapes": SHAPES, "loss": LOSS, "train": BASE, "signals": OnlineTeacher(teacher, LOSS.teacher_outputs)}
    return NestedModule(student, axes=axes, **(options | settings))


def fit(
    folder: Path, tokenizer: PreTrainedTokenizerBase, train: TrainConfig = BASE, memory: str = ""
) -> dict[str, torch.Tensor]:
    """Trains a nested family and returns its weights."""
    lightning.seed_everything(7, verbose=False)
    module = build_module(metric=TextClassification(LABELS).scorer(), train=train)
    data = TextDataModule(SPLITS, tokenizer, batch_size=train.rows, max_length=32, seed=7)
    job = TrainingJob(
        label="test", train=train, machine=replace(MACHINE, memory=memory), precision="32", seed=7,
        console=Console(quiet=True), wandb_folder=folder,
    )  # fmt: skip
    (folder / SCRATCH).mkdir(parents=True, exist_ok=True)
    fit_module(module, data, folder, job)
    return {name: value.clone() for name, value in module.state_dict().items()}


def test_slices_take_turns_in_as_many_steps_as_0_3_of_the_work_allows():
    module = build_module(shapes=(Shape((0, 1, 2), {}), Shape((0, 2), {})))
    turns = [module.choose_slice(step) for step in range(3000)]
    shares = [measure_work(step.student) / measure_work(module.student) for step in module.steps]
    assert shares == [3 / 4, 2 / 4]
    extra = sum(shares[turn] for turn in turns if turn is not None) / len(turns)
    assert extra == pytest.approx(0.3, rel=0.01)
    assert abs(turns.count(0) - turns.count(1)) <= 1


def test_slices_that_take_less_work_are_trained_in_every_step():
    module = build_module()
    shares = [measure_work(step.student) / measure_work(module.student) for step in module.steps]
    assert sum(shares) / len(shares) < 0.3
    assert [module.choose_slice(step) for step in range(6)] == [0, 1, 0, 1, 0, 1]


def test_the_loss_is_the_students_and_its_gradient_includes_the_slices(token_batch):
    module = build_module(loss=replace(LOSS, ce=1))  # at equal weights kl has no gradient
    module._trainer = SimpleNamespace(global_step=0, world_size=1)
    batch = {**token_batch, "labels": torch.arange(6) % 5}
    parameters = list(module.student.parameters())

    def gradients(loss: Tensor) -> list[Tensor]:
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        return [torch.zeros_like(p) if each is None else each for p, each in zip(parameters, found, strict=True)]

    alone = weighted_sum(module.current_loss, module.compute_terms(batch))
    expected = [a + b for a, b in zip(gradients(alone), gradients(module.compute_slice_loss(0, batch)), strict=True)]
    loss, _ = module.compute_loss(batch)
    assert torch.equal(loss, alone)
    torch.testing.assert_close(gradients(loss), expected)


def test_the_loss_of_a_slice_is_that_of_the_pruned_model(token_batch):
    module = build_module()
    batch = {**token_batch, "labels": torch.arange(6) % 5}
    student, axes = tiny_model_with_axes("bert")
    for number, shape in enumerate(SHAPES):
        alone = DistillationModule(prune(student, axes, shape), loss=LOSS, train=BASE, signals=module.signals)
        expected = weighted_sum(alone.current_loss, alone.compute_terms(batch))
        assert module.compute_slice_loss(number, batch).item() == pytest.approx(expected.item(), rel=1e-6)


def test_slices_add_no_weights_to_the_optimizer_or_the_checkpoint():
    module = build_module()
    plain = DistillationModule(tiny_model_with_axes("bert")[0], loss=LOSS, train=BASE, signals=module.signals)
    assert list(module.state_dict()) == list(plain.state_dict())
    assert len(list(module.parameters())) == len(list(plain.parameters()))


def test_training_is_repeated_to_the_bit_and_resumes_to_the_bit(tokenizer, tmp_path, monkeypatch):
    expected = fit(tmp_path / "whole", tokenizer)
    killed_at(5, monkeypatch)
    with pytest.raises(Killed):
        fit(tmp_path / "killed", tokenizer)
    monkeypatch.undo()
    found = fit(tmp_path / "killed", tokenizer)
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    plain = tiny_model_with_axes("bert")[0].state_dict()
    assert any(not torch.equal(found[f"student.{name}"], plain[name]) for name in plain)


@pytest.mark.parametrize(
    ("settings", "memory", "file"),
    [
        ({}, "100GB", PLAN_FILE),
        ({"batch_size": "auto"}, "", PLAN_FILE),
        ({"checkpointing": "auto"}, "", PLAN_FILE),
        ({"schedule": "find", "learning_rate": None}, "", RANGE_TEST),
    ],
)
def test_a_family_is_measured_before_its_training(settings, memory, file, tokenizer, tmp_path):
    found = fit(tmp_path, tokenizer, replace(BASE, **settings), memory)
    assert (tmp_path / LOGS / file).exists()
    assert all(weight.isfinite().all() for weight in found.values())


def test_measured_steps_train_the_largest_slice(token_batch, monkeypatch):
    """A training step then takes no more memory than was measured, whichever slice's turn it is."""
    module, numbers = build_module(shapes=tuple(reversed(SHAPES))), []
    compute = module.compute_slice_loss

    def record(number: int, batch: Batch) -> Tensor:
        numbers.append(number)
        return compute(number, batch)

    monkeypatch.setattr(module, "compute_slice_loss", record)
    measure_in_training(module, {**token_batch, "labels": torch.arange(6) % 5}, "none")
    assert numbers == [1, 1]
