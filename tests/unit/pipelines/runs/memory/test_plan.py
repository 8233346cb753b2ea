"""Tests of plans that fit a training into a memory budget."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from distill.data.batches.data_module import TextDataModule
from distill.data.splits.examples import Examples, Splits
from distill.errors import InputError
from distill.losses.config import LossConfig
from distill.student.build import build_student
from distill.train.config import TrainConfig
from distill.train.module import DistillationModule
from pipelines.runs.console import Console
from pipelines.runs.manifest import OPTIMIZER_BITS
from pipelines.runs.memory.budget import resolve_memory_budget
from pipelines.runs.memory.plan import FILE, MemoryPlan, MemoryPlanner, choose_plan, fit_into_memory
from pipelines.runs.memory.step_cost import PassCost, measure_in_training
from pipelines.runs.processes import World
from pipelines.runs.training_job import TrainingJob
from pipelines.settings.commands.distill import MachineConfig
from support.tiny_models import build_model

TRAIN = TrainConfig(batch_size=64, dropout=0.1)
CPU = torch.device("cpu")
PLENTY = 1 << 40


@pytest.fixture(scope="module")
def data(tokenizer) -> TextDataModule:
    draw = torch.Generator().manual_seed(0)
    texts = [" ".join(["baka"] * int(length)) for length in torch.randint(20, 120, (70,), generator=draw)]
    rows = Examples(texts, None, [number % 2 for number in range(70)])
    few = Examples(texts[:2], None, [0, 1])
    splits = Splits(("even", "odd"), rows, few, few, Examples([], None), {})
    return TextDataModule(splits, tokenizer, batch_size=64, max_length=128)


@pytest.fixture(scope="module")
def student_without_layers(tokenizer) -> PreTrainedModel:
    return build_student(build_model("bert"), "static,embeddings=8", tokenizer=tokenizer)


def build_module(train: TrainConfig = TRAIN) -> DistillationModule:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 256}
    model = BertForSequenceClassification(BertConfig(vocab_size=300, max_position_embeddings=128, **sizes))
    return DistillationModule(model, loss=LossConfig(kl=0, ce=1), train=train)


def build_job(memory: str = "") -> TrainingJob:
    machine, console = MachineConfig(memory=memory), Console(quiet=True)
    return TrainingJob("test", TRAIN, machine, "32", seed=0, console=console, wandb_folder=Path("wandb"))


def plan_with(module: DistillationModule, data: TextDataModule, budget: int, *, adapts: bool = True) -> MemoryPlanner:
    return MemoryPlanner(module, data, budget, World(), adapts=adapts)


def test_passes_are_measured_in_the_windows_of_the_training():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 256}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=2000, max_position_embeddings=1024, use_cache=False, **sizes))
    ids = torch.randint(5, 2000, (4, 1024))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    whole, windows = (
        measure_in_training(
            DistillationModule(model, loss=LossConfig(kl=0, ce=1), train=replace(TRAIN, backward_window=window)),
            batch,
            "none",
        )
        for window in (0, 128)
    )
    assert windows.later < whole.later / 2


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon", "radam"])
def test_planning_leaves_weights_mode_and_gradients_as_they_were(data, optimizer):
    module = build_module(replace(TRAIN, optimizer=optimizer))
    module.student.eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()
    plan_with(module, data, 0).list_plans()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert module.train_config.checkpointing == "none"


def test_a_training_that_fits_is_left_as_it_is(data):
    plans = plan_with(build_module(), data, PLENTY).list_plans()
    assert [(plan.checkpointing, plan.parts, plan.optimizer) for plan in plans] == [("none", 1, "adamw")]
    assert choose_plan(plans) is plans[0]


def test_less_memory_means_more_parts_or_recomputation_within_the_budget(data):
    module = build_module()
    planner = plan_with(module, data, PLENTY)
    plain = planner.list_plans()[0]
    floor = planner.held_bytes + planner.states[0] + 2 * planner.gradients
    assert plain.peak - floor > 20e6  # activations
    budget = int(floor + 0.4 * (plain.peak - floor))
    planner = plan_with(module, data, budget)
    plans = planner.list_plans()
    chosen = choose_plan(plans)
    assert chosen.peak <= budget
    assert chosen.parts > 1 or chosen.checkpointing != "none"
    assert plans[0].parts > 1
    assert plans[0].parts >= next(plan for plan in plans if plan.checkpointing == "full").parts


def test_only_the_parts_change_where_the_settings_name_a_mode(data):
    planner = plan_with(build_module(replace(TRAIN, checkpointing="selective")), data, PLENTY)
    assert planner.list_modes() == ["selective"]
    assert plan_with(build_module(), data, PLENTY, adapts=False).list_modes() == ["none"]


def test_the_batch_alone_is_split_in_a_student_without_layers(student_without_layers, data, tmp_path):
    module = DistillationModule(student_without_layers, loss=LossConfig(kl=0, ce=1), train=TRAIN)
    module.scratch = tmp_path
    plans = plan_with(module, data, 0).list_plans()
    assert {plan.checkpointing for plan in plans} == {"none"}
    assert {plan.parts for plan in plans} == {64}
    automatic = DistillationModule(student_without_layers, loss=module.loss, train=replace(TRAIN, checkpointing="auto"))
    fit_into_memory(automatic, data, tmp_path, build_job())
    assert automatic.train_config.checkpointing == "none"
    data.parts = 1


def test_batches_whose_rows_are_compared_stay_whole(data):
    module = build_module()
    module.loss = LossConfig(kl=0, ce=1, balance_every=5)
    assert list(plan_with(module, data, PLENTY).list_parts()) == [1]
    assert list(plan_with(build_module(), data, PLENTY).list_parts()) == [1, 2, 4, 8, 16, 32, 64]


def test_a_budget_below_the_floor_names_what_would_fit(data, tmp_path):
    with pytest.raises(InputError, match=r"machine.memory: expected more than [\d,]+ MB for 'test'.*found 1 MB"):
        fit_into_memory(build_module(), data, tmp_path, build_job(memory="1MB"))
    assert not (tmp_path / FILE).exists()


def test_without_a_budget_the_smallest_plan_is_tried_where_none_is_predicted_to_fit(data):
    plans = plan_with(build_module(), data, 0, adapts=False).list_plans()
    assert choose_plan(plans, is_required=False) == min(plans, key=lambda plan: plan.peak)


def test_activations_are_offloaded_before_optimizer_states_get_fewer_bits(data):
    plans = plan_with(build_module(), data, 0).list_plans()
    assert [plan.optimizer for plan in plans] == ["adamw"] * 6 + ["adamw-8bit"] * 6 + ["adamw-4bit"] * 6
    assert [plan.offload for plan in plans] == (["none"] * 3 + ["activations"] * 3) * 3
    sgd_plans = plan_with(build_module(replace(TRAIN, optimizer="sgd")), data, 0).list_plans()
    assert {plan.optimizer for plan in sgd_plans} == {"sgd"}


def test_the_stored_plan_of_a_stage_is_applied_again(data, tmp_path):
    module = build_module(replace(TRAIN, checkpointing="auto"))
    stored = '{"checkpointing": "full", "parts": 4, "optimizer": "adamw", "peak": 1, "seconds": 1.0}'
    (tmp_path / FILE).write_text(stored)
    assert fit_into_memory(module, data, tmp_path, build_job()) == {}
    assert (module.train_config.checkpointing, module.micro_batches.parts, data.parts) == ("full", 4, 4)
    assert (tmp_path / FILE).read_text() == stored
    data.parts = 1


@pytest.mark.parametrize("bits", [8, 4])
def test_a_plan_that_reduces_the_optimizer_states_is_in_the_metrics_and_said_on_resuming(
    bits, data, tmp_path, monkeypatch, capsys
):
    plan = MemoryPlan("none", 1, f"adamw-{bits}bit", peak=1, seconds=1.0)
    monkeypatch.setattr(MemoryPlanner, "list_plans", lambda self: [plan])
    remark = f"test: resumes with adamw-{bits}bit, which was chosen to fit a memory limit"
    for memory, is_resumed in (("100GB", False), ("", True)):
        module, job = build_module(), replace(build_job(memory), console=Console())
        assert fit_into_memory(module, data, tmp_path, job) == {OPTIMIZER_BITS: bits}
        assert module.train_config.optimizer == f"adamw-{bits}bit"
        assert (remark in capsys.readouterr().out) == is_resumed


def test_a_requested_low_bit_optimizer_is_no_replacement(data, tmp_path, capsys):
    stored = {"checkpointing": "none", "parts": 1, "optimizer": "adamw-8bit", "peak": 1, "seconds": 1.0}
    (tmp_path / FILE).write_text(json.dumps(stored))
    module, job = build_module(replace(TRAIN, optimizer="adamw-8bit")), replace(build_job(), console=Console())
    assert fit_into_memory(module, data, tmp_path, job) == {}
    assert capsys.readouterr().out == ""


def test_an_offloaded_plan_takes_less_than_the_plain_one_and_is_applied(data, tmp_path):
    module = build_module()
    module.scratch = tmp_path
    planner = plan_with(module, data, 0)
    plain, offloaded = (planner._measure("none", offload, 64) for offload in ("none", "activations"))
    assert offloaded.later < plain.later
    planner.plan_mode("none", "activations", "adamw").apply(module, data)
    assert module.train_config.offload == "activations"
    data.parts = 1


def test_a_plan_whose_measured_peak_does_not_fit_is_followed_by_one_with_more_parts(data):
    planner = plan_with(build_module(), data, 0)
    costs = {1: PassCost(0, 10 << 20, 0.1), 2: PassCost(0, 11 << 20, 0.1), 32: PassCost(0, 90 << 20, 0.5)}
    planner.costs = {("none", "none", rows): cost for rows, cost in costs.items()}
    planner.costs[("none", "none", 16)] = PassCost(0, 20 << 20, 0.2)
    states, step_peak = planner.states
    passes = 42 << 20  # 32 rows are predicted to take 41 MiB, and measured with 90
    allowed = planner.held_bytes + planner.gradients + max(states, step_peak) + passes
    planner.budget = planner.held_bytes + round(1.1 * (allowed - planner.held_bytes))
    plan = planner.plan_mode("none", "none", "adamw")
    assert (plan.parts, plan.seconds) == (4, pytest.approx(0.8))


def test_the_chosen_plan_is_stored(data, tmp_path):
    module = build_module(replace(TRAIN, checkpointing="auto"))
    fit_into_memory(module, data, tmp_path, build_job())
    assert module.train_config.checkpointing == "none"
    assert json.loads((tmp_path / FILE).read_text())["parts"] == 1


def test_nothing_is_measured_without_a_budget_or_auto(data, tmp_path):
    fit_into_memory(build_module(), data, tmp_path, build_job())
    assert not (tmp_path / FILE).exists()


def test_the_budget_is_the_size_in_the_settings_or_below_what_is_free():
    assert resolve_memory_budget("3GB", CPU, 1) == 3_000_000_000
    one, two = resolve_memory_budget("auto", CPU, 1), resolve_memory_budget("auto", CPU, 2)
    assert 0 < two < one
