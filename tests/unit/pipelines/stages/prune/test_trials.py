"""Tests of short trainings of candidates, and of their elimination: which continue, and which one wins."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compress.prune.budget import Budget
from compress.quantize.config import QuantizeConfig
from compress.sparsity.config import SparsityConfig
from distill.data.batches.data_module import TextDataModule
from distill.data.config import DataConfig
from distill.data.splits.examples import Examples, Splits
from distill.losses.config import LossConfig
from distill.student.build import build_student
from distill.tasks.logit_rows import OutputRows
from distill.teacher.online import OnlineTeacher
from distill.train.averaging import set_optimizer_mode
from distill.train.config import TrainConfig
from pipelines.runs.console import Console
from pipelines.runs.manifest import JsonObject
from pipelines.settings.commands.distill import DistillConfig, MachineConfig, TeacherConfig
from pipelines.settings.plan import SpeedTarget
from pipelines.stages.prune.search_device import choose_search_device
from pipelines.stages.prune.shape import describe_search
from pipelines.stages.prune.trials import Trial, eliminate_trials, find_trial_loss, plan_rounds
from support.tiny_models import LABELS, build_model, make_rows

RATE = 0.01
TARGET = SpeedTarget("2x", 2.0, 0.0)


@pytest.mark.parametrize("accelerator", ["cpu", "mps"])
def test_without_an_nvidia_gpu_scores_and_trials_are_on_the_cpu(accelerator):
    assert choose_search_device(accelerator) == torch.device("cpu")


@dataclass
class Learner:
    """A candidate whose divergence falls from `start` by `rate` per step."""

    start: float
    rate: float
    turns: list[int] = field(default_factory=list)

    def run(self, steps: int) -> None:
        self.turns.append(steps)

    @property
    def module(self) -> SimpleNamespace:
        return SimpleNamespace(student=self)


class Comparison:
    """A comparison on one text, in place of one with a teacher."""

    def __len__(self) -> int:
        return 1

    def divergence(self, learner: Learner) -> float:
        return learner.start - learner.rate * sum(learner.turns)


def test_the_candidate_that_improves_fastest_wins():
    learners = [Learner(10.0, 0.001 * number) for number in (3, 9, 1, 7, 2, 8, 4, 6, 5, 0)]
    winner, divergences = eliminate_trials(learners, Comparison(), 90, Console())
    assert winner == 1
    assert learners[1].turns == [10, 30, 90]
    assert divergences[1] == pytest.approx([10 - 0.09, 10 - 0.36, 10 - 1.17])
    assert sorted(map(len, divergences)) == [1] * 6 + [2] * 2 + [3] * 2


def test_candidates_are_judged_after_training_and_not_by_their_start():
    slow, quick = Learner(1.0, 0.001), Learner(1.1, 0.01)
    assert eliminate_trials([slow, quick], Comparison(), 40, Console())[0] == 1
    assert slow.turns == quick.turns == [40]


@pytest.mark.parametrize(
    ("trials", "plan"),
    [
        (2, [(2, 450)]),
        (3, [(3, 450)]),
        (4, [(4, 150), (2, 450)]),
        (18, [(18, 50), (6, 150), (2, 450)]),
        (28, [(28, 16), (10, 50), (4, 150), (2, 450)]),
    ],
)
def test_rounds_get_longer_as_candidates_drop_out_at_bounded_total_cost(trials, plan):
    assert plan_rounds(trials, 450) == plan
    assert sum(count * steps for count, steps in plan_rounds(trials, 450)) <= 2 * 3 * 450


def test_every_round_has_at_least_one_step():
    assert plan_rounds(30, 2) == [(30, 1), (10, 1), (4, 1), (2, 2)]


@pytest.fixture
def texts(tokenizer) -> TextDataModule:
    rows = make_rows(40, 1)
    train = Examples([text for text, _ in rows], None, [LABELS.index(label) for _, label in rows])
    empty = Examples([], None)
    return TextDataModule(Splits(LABELS, train, empty, empty, empty, {}), tokenizer, batch_size=8, max_length=32)


TRAIN = TrainConfig(learning_rate=RATE, head_rate=1, dropout=0, batch_size=8)


def start_trial(texts: TextDataModule, train: TrainConfig = TRAIN, **settings: str) -> Trial:
    """Returns a trial of a narrow student of the tiny BERT; its loss has a term on hidden states too."""
    torch.manual_seed(0)
    teacher = build_model("bert")
    loss = LossConfig(kl=1, hidden=1)
    signals = OnlineTeacher(teacher, loss.without_layer_terms.teacher_outputs)
    return Trial(build_student(teacher, "layers=2,hidden=16"), texts, signals, loss, train, OutputRows(), **settings)


def test_a_trial_learns_from_the_teachers_logits_alone(texts):
    trial = start_trial(texts)
    batch = next(texts.repeat_train_batches())
    with torch.no_grad():
        before = trial.module.compute_terms(batch)
    trial.run(30)
    with torch.no_grad():
        after = trial.module.compute_terms(batch)
    assert list(before) == ["kl"]
    assert after["kl"] < 0.8 * before["kl"]


def test_a_trial_uses_the_mean_weights_of_ramps():
    loss = LossConfig(kl=0, hidden=1, ce=1, ramps={"kl": (0.0, 2.0), "hidden": (1.0, 0.0)})
    found = find_trial_loss(loss)
    assert (found.kl, found.ce, found.hidden, found.ramps) == (1.0, 1, 0.0, {})


def test_a_trial_in_bf16_mixed_rounds_its_products_and_learns_nearly_the_same(texts):
    mixed, plain = start_trial(texts, precision="bf16-mixed"), start_trial(texts)
    batch = next(texts.repeat_train_batches())
    with torch.no_grad():
        before = plain.module.compute_terms(batch)["kl"]
    for trial in (mixed, plain):
        trial.run(30)
    with torch.no_grad():
        learned, expected = (before - trial.module.compute_terms(batch)["kl"] for trial in (mixed, plain))
    weights, others = (trial.module.student.classifier.weight for trial in (mixed, plain))
    assert weights.dtype == torch.float32
    assert not torch.equal(weights, others)
    assert float(learned) == pytest.approx(float(expected), rel=0.1)


def describe(target: SpeedTarget = TARGET, precision: str = "32", **settings: Any) -> JsonObject:
    """Returns what the key of a search contains."""
    config = DistillConfig("runs/x", TeacherConfig("body"), data=DataConfig("texts"), **settings)
    return describe_search(config, target, precision)


@pytest.mark.parametrize(
    ("precision", "found"), [("32", None), ("bf16-mixed", "bf16-mixed"), ("16-mixed", None), ("fp8", None)]
)
def test_the_key_of_a_search_names_the_precision_of_its_trials_unless_they_are_in_float32(precision, found):
    settings = describe(precision=precision, machine=MachineConfig(accelerator="cpu"))
    assert settings.get("precision") == found


@pytest.mark.parametrize(
    "train", [TrainConfig(ema_decay=0.9), TrainConfig(optimizer="lion"), TrainConfig(accumulate=2)]
)
def test_the_key_of_a_search_names_training_settings_that_change_its_trials(train):
    plain, changed = describe(train=TrainConfig()), describe(train=train)
    assert plain.keys() == changed.keys()
    assert plain["train"] != changed["train"]


@pytest.mark.parametrize(
    ("settings", "multiple"),
    [
        ({}, None),
        ({"quantize": QuantizeConfig("int8")}, None),
        ({"quantize": QuantizeConfig("int4")}, 32),
        ({"quantize": QuantizeConfig("int8-groups"), "export": "onnxruntime"}, 16),
        ({"sparsity": SparsityConfig("2:4")}, 4),
        ({"sparsity": SparsityConfig("4x1", 0.5)}, 4),
        ({"sparsity": SparsityConfig("3x2", 0.5), "quantize": QuantizeConfig("int4")}, 96),
    ],
)
def test_the_key_of_a_search_names_the_multiple_of_its_neurons_unless_there_is_none(settings, multiple):
    assert describe(**settings).get("ffn_multiple") == multiple


@pytest.mark.parametrize(
    ("target", "frontier", "stored"),
    [
        (SpeedTarget("2x", 2.0, 0.0), True, False),
        (SpeedTarget("2x", 2.0, 0.0, 10_000_000), False, False),
        (SpeedTarget("2x", 2.0, 0.0, 10_000_000), True, True),
        (SpeedTarget("2x", 2.0, 0.0, 10_000_000, correction=1.1), False, True),
    ],
)
def test_only_keys_of_searches_whose_files_may_have_been_too_large_say_what_follows(target, frontier, stored):
    budget = Budget(speedup="2", frontier=frontier)
    assert ("too_large" in describe(target, budget=budget)) is stored


AVERAGING = {"schedule-free": replace(TRAIN, optimizer="schedule-free"), "ema": replace(TRAIN, ema_decay=0.9)}


@pytest.mark.parametrize("train", AVERAGING.values(), ids=AVERAGING)
def test_a_trial_is_compared_with_its_averaged_weights(texts, train):
    trial = start_trial(texts, train)
    trial.run(5)
    averaged = {name: weight.clone() for name, weight in trial.module.student.state_dict().items()}
    set_optimizer_mode(trial.optimizer, "train")
    trained = trial.module.student.state_dict()
    assert not any(torch.equal(averaged[name], trained[name]) for name in averaged if name.endswith("query.weight"))


@pytest.mark.parametrize("train", [TRAIN, *AVERAGING.values()], ids=["plain", *AVERAGING])
def test_a_trial_that_continues_is_the_same_as_one_in_a_single_run(texts, train):
    parts, whole = start_trial(texts, train), start_trial(texts, train)
    parts.run(2)
    parts.run(3)
    whole.run(5)
    for name, weight in whole.module.student.state_dict().items():
        found = parts.module.student.state_dict()[name]
        tolerance = 1e-3 if train.optimizer == "schedule-free" else 0.0  # averages are computed back and forth
        torch.testing.assert_close(found, weight, rtol=0, atol=tolerance)


def test_the_rate_of_a_trial_warms_up_over_twenty_steps_and_stays(texts):
    trial = start_trial(texts)
    rates = []
    for steps in (1, 9, 10, 5):
        trial.run(steps)
        rates.append(max(group["lr"] for group in trial.optimizer.param_groups))
    assert rates == pytest.approx([RATE / 20, RATE / 2, RATE, RATE])
