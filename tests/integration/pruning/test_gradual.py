"""Pruning during training: units that are masked step by step, and rounds of pruning and training."""

import json
import shutil
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from transformers import PreTrainedModel

from compress.errors import CompressError
from compress.measure.load import ProcessorSeconds
from compress.measure.process import Opener
from compress.prune.budget import Budget
from compress.prune.config import PruneConfig
from compress.prune.importance.gates import LAYERS, Gates
from compress.prune.schedule import interpolate_cubic
from compress.prune.search.candidates import get_sizes
from compress.prune.search.cost import CostModel, ModelSizes
from compress.quantize.config import QuantizeConfig
from distill.checkpoint.custom_models import load_model_folder
from distill.data.batches.data_module import TextDataModule
from distill.data.config import DataConfig
from distill.data.splits.examples import Examples, Splits
from distill.errors import InputError
from distill.losses.config import LossConfig
from distill.parallel.layout import Layout
from distill.slicing import Shape, prune
from distill.tasks.text_classification import TextClassification
from distill.teacher.config import TeacherConfig
from distill.teacher.online import OnlineTeacher
from distill.train.config import TrainConfig
from pipelines.runs.checkpoint_schedule import StopAgreement
from pipelines.runs.console import Console
from pipelines.runs.manifest import SCRATCH
from pipelines.runs.stage import Run
from pipelines.runs.stops import StopRequested
from pipelines.runs.trainer import fit_module
from pipelines.runs.training_job import TrainingJob
from pipelines.settings.commands.distill import DistillConfig, MachineConfig
from pipelines.settings.defaults import fill_defaults
from pipelines.settings.facts import Facts
from pipelines.settings.layouts import Layouts
from pipelines.settings.resolve import check_pipeline_stages, resolve
from pipelines.settings.rules.table import check_rules
from pipelines.stages.prune import budget_timing
from pipelines.stages.prune.gradual import MaskedModule, masking_settings, measure_gap
from pipelines.stages.prune.gradual_masking import (
    Goal,
    LearnedMasking,
    MovementMasking,
    UnitMasking,
    build_learned_masks,
    expected_cost,
)
from pipelines.stages.run_stages import run_stages
from pipelines.stages.students import split_epochs
from support.interrupted_training import Killed, killed_at
from support.pruning_axes import tiny_model_with_axes
from support.run_inputs import write_csv
from support.tiny_models import LABELS, build_model, make_rows, saved, word_tokenizer

MACHINE = MachineConfig(accelerator="cpu", precision="32", threads=1)
TRAIN = masking_settings(TrainConfig(learning_rate=1e-3, batch_size=8, dropout=0.1, checkpoint_every=100), 3)
GOAL = Goal((0, 1, 3), {"hidden": 20, "layers.0.heads": 2, "layers.1.ffn": 9, "layers.3.heads": 1, "layers.3.ffn": 40})
COSTS = CostModel((0.1, 1e-3, 0.01, 1e-4, 1e-3, 1e-4, 1e-4, 1e-5), 0.0)
COLUMNS = [(text, LABELS.index(label)) for text, label in make_rows(56, 3)]
TEXTS = Examples([text for text, _ in COLUMNS], None, [label for _, label in COLUMNS])
SPLITS = Splits(LABELS, TEXTS, TEXTS, TEXTS, Examples([], None), {})


class Watch(Callback):
    """A callback that records the gates after each batch; the last record contains the final gates."""

    def __init__(self, gates: Gates):
        self.gates, self.seen = gates, []

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        self.seen.append({name: gate.detach().clone() for name, gate in self.gates.values.items()})


def masking_by(masks: str, goal: Goal = GOAL) -> tuple[PreTrainedModel, list, UnitMasking]:
    model, axes = tiny_model_with_axes("bert")
    gates = Gates(model, axes)
    if masks == "movement":
        return model, axes, MovementMasking(gates, goal)
    whole = get_sizes(axes)
    cost = expected_cost(COSTS, axes, goal.layers, whole)
    target = COSTS.predict(ModelSizes(20, (2, 4, 1), (64, 9, 40))) / COSTS.predict(whole)
    sizes = {name: gates.get_size(name) for name in goal.units}
    return model, axes, LearnedMasking(gates, goal, build_learned_masks(sizes, cost, target))


def mask_once(
    tokenizer, folder: Path, masks: str, train: TrainConfig = TRAIN
) -> tuple[MaskedModule, UnitMasking, Watch]:
    lightning.seed_everything(7, verbose=False)
    model, _, masking = masking_by(masks)
    teacher = OnlineTeacher(build_model("bert"), ("logits",))
    module = MaskedModule(
        model,
        masking.masks,
        loss=LossConfig(kl=1, ce=1),
        train=train,
        signals=teacher,
        metric=TextClassification(LABELS).scorer(),
    )
    watch = Watch(masking.gates)
    data = TextDataModule(SPLITS, tokenizer, batch_size=8, max_length=32, seed=7)
    job = TrainingJob(
        label="test", train=train, machine=MACHINE, precision="32", seed=7, console=Console(quiet=True),
        wandb_folder=folder,
    )  # fmt: skip
    (folder / SCRATCH).mkdir(parents=True, exist_ok=True)
    with masking.gates:
        fit_module(module, data, folder, job, [masking, watch])
    return module, masking, watch


@pytest.fixture(scope="module")
def movement_training(tokenizer, tmp_path_factory: pytest.TempPathFactory) -> tuple[MaskedModule, UnitMasking, Watch]:
    """The result of a training of 21 steps that reaches GOAL."""
    return mask_once(tokenizer, tmp_path_factory.mktemp("moved"), "movement")


@pytest.fixture(scope="module")
def learned_training(tokenizer, tmp_path_factory: pytest.TempPathFactory) -> tuple[MaskedModule, UnitMasking, Watch]:
    return mask_once(tokenizer, tmp_path_factory.mktemp("learned"), "learned")


@pytest.fixture(params=[pytest.param("movement", marks=pytest.mark.slow), "learned"])
def masked_training(request: pytest.FixtureRequest):
    """(masks, module, masking, watch)"""
    return request.param, *request.getfixturevalue(
        "movement_training" if request.param == "movement" else "learned_training"
    )


def test_the_final_gates_keep_the_number_of_units_of_the_shape(masked_training):
    _, _, masking, _ = masked_training
    gates = masking.gates.values
    assert {name: int(gate.sum()) for name, gate in gates.items() if name != LAYERS} == GOAL.units
    assert gates[LAYERS].tolist() == [1, 1, 0, 1]
    assert all(set(gate.tolist()) <= {0.0, 1.0} for gate in gates.values())
    assert {name: len(units) for name, units in masking.shape().kept.items()} == GOAL.units
    assert masking.shape().layers == GOAL.layers


def test_the_pruned_model_computes_the_same_as_the_gated_model(masked_training, token_batch):
    _, module, masking, _ = masked_training
    _, axes = tiny_model_with_axes("bert")
    small = prune(module.student, axes, masking.shape()).eval()
    whole = module.student.eval()
    with torch.no_grad():
        after, plain = small(**token_batch).logits, whole(**token_batch).logits
        with masking.gates:
            before = whole(**token_batch).logits
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5)
    assert float((after - plain).abs().max()) > 1e-2  # the gates change the logits
    assert not any(name.startswith("masks") for name in small.state_dict())


def test_ramps_and_schedules_know_the_length_of_the_training(masked_training):
    _, module, _, _ = masked_training
    assert module.total_steps == module.trainer.global_step > 1
    groups = module.trainer.optimizers[0].param_groups
    masks = {id(parameter) for parameter in module.masks.parameters()}
    in_groups = {id(parameter) for group in groups for parameter in group["params"]}
    assert masks <= in_groups


def test_another_model_than_the_gated_one_is_rejected(masked_training, token_batch):
    _, module, masking, _ = masked_training
    _, axes = tiny_model_with_axes("bert")
    other = next(pair for pair in ([0, 1], [2, 3]) if pair != masking.shape().kept["layers.0.heads"].tolist())
    wrong = dict(masking.shape().kept) | {"layers.0.heads": torch.tensor(other)}
    with (
        masking.gates,
        pytest.raises(CompressError, match="expected logits without the masked units to differ by"),
    ):
        measure_gap(module.student, prune(module.student, axes, Shape(GOAL.layers, wrong)), token_batch)


def test_the_kept_units_are_those_that_the_masks_rank_highest(masked_training):
    masks, module, masking, _ = masked_training
    ranking = module.masks.scores() if masks == "movement" else module.masks.compute_open_probability()
    ranking = {name: rank.detach() for name, rank in ranking.items()}
    assert all(len(rank.unique()) > 1 for rank in ranking.values())  # the rankings were trained
    for name, units in masking.kept.items():
        if name == "hidden" and masks == "movement":
            continue  # masked hidden coordinates stay masked
        rest = torch.ones(len(ranking[name]), dtype=torch.bool).index_fill(0, units, False)
        assert float(ranking[name][units].min()) >= float(ranking[name][rest].max()), name


def test_the_number_of_masked_units_follows_the_cubic_schedule(movement_training):
    _, masking, watch = movement_training
    steps, every = 21, 2
    assert masking.steps == steps
    assert masking.every == every
    for step, gates in enumerate(watch.seen[:-1]):  # the last batch ends with the final gates
        chosen = step - step % every
        for name, left in GOAL.units.items():
            wanted = round(interpolate_cubic(chosen, 0, steps, 0, masking.gates.get_size(name) - left))
            assert int((gates[name] == 0).sum()) == wanted, (step, name)
        assert float(gates[LAYERS][2]) == pytest.approx(1 - interpolate_cubic(step, 0, steps, 0, 1))
        assert gates[LAYERS][[0, 1, 3]].tolist() == [1, 1, 1]
    assert sum(int((gates["layers.1.ffn"] == 0).sum()) > 0 for gates in watch.seen) > 15  # masked throughout training


def test_masked_hidden_coordinates_stay_masked(movement_training):
    _, _, watch = movement_training
    for before, after in zip(watch.seen, watch.seen[1:], strict=False):
        assert not ((before["hidden"] == 0) & (after["hidden"] != 0)).any()


def test_learned_gates_are_sampled_until_the_final_decision(masked_training):
    masks, _, masking, watch = masked_training
    drawn = any(0 < float(value) < 1 for gates in watch.seen[:-1] for value in gates["layers.1.ffn"])
    assert drawn == (masks == "learned")
    if isinstance(masking, LearnedMasking):
        assert masking.learned.warmup == 10
        assert (masking.learned.multipliers != 0).all()  # only the penalty changes them
        with torch.no_grad():
            assert float(masking.learned.cost(masking.learned.compute_open_probability())) < float(
                masking.learned.begin
            )


@pytest.mark.slow
def test_learned_masks_approach_the_cost_of_the_shape(tokenizer, tmp_path):
    module, _, _ = mask_once(tokenizer, tmp_path, "learned", replace(TRAIN, epochs=43))
    masks = module.masks
    with torch.no_grad():
        cost_ratio, begin = float(masks.cost(masks.compute_open_probability())), float(masks.begin)
    assert abs(cost_ratio - masks.target) < 0.3 * (begin - masks.target), (cost_ratio, begin, masks.target)


def test_the_expected_cost_of_binary_gates_equals_the_cost_model():
    _, axes = tiny_model_with_axes("bert")
    whole, small = get_sizes(axes), ModelSizes(20, (2, 4, 1), (64, 9, 40))
    cost = expected_cost(COSTS, axes, GOAL.layers, whole)
    gates = {axis.name: torch.ones(axis.units) for axis in axes if axis.name in GOAL.units}
    full = ModelSizes(32, (4,) * 3, (64,) * 3)
    assert float(cost(gates)) == pytest.approx(COSTS.predict(full) / COSTS.predict(whole))
    for name, left in GOAL.units.items():
        gates[name][left:] = 0
    assert float(cost(gates)) == pytest.approx(COSTS.predict(small) / COSTS.predict(whole))


def test_masks_have_separate_learning_rates_and_no_weight_decay(tokenizer, tmp_path):
    module, _, _ = mask_once(tokenizer, tmp_path, "learned", replace(TRAIN, epochs=1))
    groups = module.trainer.optimizers[0].param_groups
    mask_ids = {id(parameter) for parameter in module.masks.parameters()}
    rates = {1e-3: False, 0.1: True, 1.0: True}  # short trainings use the highest rates
    assert {group["initial_lr"] for group in groups} == rates.keys()
    for group in groups:
        is_mask = {id(parameter) in mask_ids for parameter in group["params"]}
        assert is_mask == {rates[group["initial_lr"]]}
        assert group["weight_decay"] == 0 or not is_mask.pop()


OFTEN = replace(TRAIN, checkpoint_every=3)


def assert_same_bits(
    one: tuple[MaskedModule, UnitMasking, Watch], other: tuple[MaskedModule, UnitMasking, Watch]
) -> None:
    other_state = other[0].state_dict()
    for name, value in one[0].state_dict().items():
        assert torch.equal(other_state[name], value), name
    for name, units in one[1].kept.items():
        assert torch.equal(other[1].kept[name], units), name


def train_with_stop(
    tokenizer, folder: Path, masks: str, train: TrainConfig, batch: int
) -> tuple[MaskedModule, UnitMasking, Watch]:
    """Runs a training that is killed after `batch` batches and restarted."""
    with pytest.MonkeyPatch.context() as patch:
        killed_at(batch, patch)
        with pytest.raises(Killed):
            mask_once(tokenizer, folder, masks, train)
    assert list((folder / SCRATCH / "checkpoints").glob("*.ckpt"))
    return mask_once(tokenizer, folder, masks, train)


def test_a_stopped_training_of_learned_masks_resumes_bit_identically(learned_training, tokenizer, tmp_path):
    assert_same_bits(learned_training, train_with_stop(tokenizer, tmp_path, "learned", OFTEN, 11))


@pytest.mark.parametrize("masks", ["movement", "learned"])
def test_a_training_stopped_after_its_last_step_resumes_with_the_final_gates(
    masks, tokenizer, tmp_path, monkeypatch, movement_training, learned_training
):
    ended = []

    def is_due_in_the_last_epoch(agreement: StopAgreement) -> bool:
        ended.append(agreement)
        agreement.number = signal.SIGTERM if len(ended) == TRAIN.epochs else 0
        return bool(agreement.number)

    with monkeypatch.context() as patch:
        patch.setattr(StopAgreement, "is_due_now", is_due_in_the_last_epoch)
        with pytest.raises(StopRequested):
            mask_once(tokenizer, tmp_path, masks)
    resumed = mask_once(tokenizer, tmp_path, masks)
    whole = movement_training if masks == "movement" else learned_training
    assert_same_bits(whole, resumed)
    for name, gate in whole[2].seen[-1].items():
        assert torch.equal(resumed[1].gates.values[name], gate), name


@pytest.mark.slow
def test_masking_with_accumulated_batches_resumes_bit_identically(tokenizer, tmp_path):
    train = replace(TRAIN, epochs=2, accumulate=2, checkpoint_every=1)
    whole = mask_once(tokenizer, tmp_path / "whole", "movement", train)
    assert whole[1].steps == 8
    seen = whole[2].seen  # 7 batches an epoch: the fourth step of each epoch has one batch
    for first, second in ((0, 1), (2, 3), (4, 5), (7, 8), (9, 10), (11, 12)):
        for name, gate in seen[first].items():
            assert torch.equal(seen[second][name], gate), f"{name} was masked anew within a step"
    assert_same_bits(whole, train_with_stop(tokenizer, tmp_path / "stopped", "movement", train, 5))


@pytest.mark.slow
def test_the_latest_masks_survive_a_stop_between_two_choices(movement_training, tokenizer, tmp_path):
    """Step 3 resumes with the units chosen in step 2, although the scores have changed since."""
    resumed = train_with_stop(tokenizer, tmp_path, "movement", OFTEN, 4)
    assert len(resumed[2].seen) == len(movement_training[2].seen) - 3
    for name in GOAL.units:
        assert torch.equal(resumed[2].seen[0][name], movement_training[2].seen[3][name])
    assert_same_bits(movement_training, resumed)


def test_gradient_clipping_applies_to_the_student_alone(learned_training):
    module, _, _ = learned_training
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    module.configure_gradient_clipping(None, 1.0)
    norm = torch.stack([parameter.grad.norm() for parameter in module.student.parameters()]).norm()
    assert float(norm) == pytest.approx(1.0, rel=1e-3)
    assert all(bool((parameter.grad == 1).all()) for parameter in module.masks.parameters())


# Complete runs of the stages.


@contextmanager
def predict_latencies(openers: Mapping[str, Opener], threads: int) -> Iterator[SimpleNamespace]:
    """Replaces measured latencies by ones computed from sizes: tiny models are faster than the clock's noise."""
    models = {name: opener().model for name, opener in openers.items()}

    def time_rounds(inputs, *, rounds, **rest) -> dict[str, np.ndarray]:
        return {n: np.full((rounds, len(each)), COSTS.predict(sizes_in(models[n]))) for n, each in inputs.items()}

    yield SimpleNamespace(time_rounds=time_rounds, processors=ProcessorSeconds(), reopen_models=lambda: None)


def sizes_in(model: PreTrainedModel) -> ModelSizes:
    """Returns the sizes of the weights of a BERT with heads of width 8."""
    layers = model.bert.encoder.layer
    heads = tuple(len(layer.attention.self.query.weight) // 8 for layer in layers)
    ffn = tuple(len(layer.intermediate.dense.weight) for layer in layers)
    return ModelSizes(len(model.bert.embeddings.LayerNorm.weight), heads, ffn)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a teacher and data; while it is in use, latencies are computed from the models' sizes."""
    folder = tmp_path_factory.mktemp("stages")
    tokenizer = word_tokenizer()
    saved(build_model("bert"), tokenizer, folder / "teacher")
    (folder / "data").mkdir()
    for split, count, seed in (("train", 90, 1), ("test", 40, 2)):
        write_csv(folder / "data" / f"{split}.csv", make_rows(count, seed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget_timing, "open_timing_process", predict_latencies)
        yield folder


def settings(folder: Path, output: str, epochs: int = 4, **prune: Any) -> DistillConfig:
    return DistillConfig(
        output=str(folder / output),
        teacher=TeacherConfig(model=str(folder / "teacher")),
        data=DataConfig(path=str(folder / "data"), max_length=32),
        budget=Budget(speedup="2", runtime="pytorch", precision="fp32"),
        prune=PruneConfig(samples=16, trial_steps=0, **prune),
        train=TrainConfig(epochs=epochs, learning_rate=1e-3, batch_size=8, checkpoint_every=4),
        machine=MACHINE,
        until="distill",
    )


def run_to_student(config: DistillConfig) -> dict[str, Any]:
    run = Run(Path(config.output), config.seed, Console(quiet=True))
    try:
        stages, _ = run_stages(run, resolve(config, 1))
    finally:
        run._lock.close()
    return stages


@pytest.fixture(scope="module", params=[pytest.param("movement", marks=pytest.mark.slow), "learned"])
def gradual_run(request: pytest.FixtureRequest, folder: Path) -> tuple[DistillConfig, dict[str, Any]]:
    config = settings(folder, "run", schedule="gradual", masks=request.param)
    return config, run_to_student(config)


@pytest.fixture(scope="module")
def stages_of_rounds(folder: Path) -> dict[str, Any]:
    return run_to_student(settings(folder, "run", schedule="iterative", rounds=3))


def shape_of(stage: Any) -> dict[str, Any]:
    return json.loads((stage.folder / "shape.json").read_text())


def read_model_sizes(stage: Any) -> ModelSizes:
    return sizes_in(load_model_folder(stage.folder / "model"))


def read_sizes(stage: Any) -> ModelSizes:
    return ModelSizes.from_dict(shape_of(stage)["sizes"])


def test_a_gradually_pruned_student_has_exactly_the_sizes_of_the_shape(gradual_run):
    _, stages = gradual_run
    wanted = read_sizes(stages["shape-2x"])
    assert read_model_sizes(stages["mask-2x"]) == read_model_sizes(stages["distill-2x"]) == wanted
    chosen, kept = shape_of(stages["shape-2x"])["shape"], shape_of(stages["mask-2x"])["shape"]
    assert kept["layers"] == chosen["layers"]
    assert {name: len(units) for name, units in kept["kept"].items()} == {
        name: len(units) for name, units in chosen["kept"].items()
    }
    assert chosen["kept"]  # otherwise no unit was masked
    assert stages["mask-2x"].metrics["gap"] < 1e-5


def test_masking_and_recovery_share_the_requested_epochs(gradual_run):
    _, stages = gradual_run
    epochs = [stages[name].manifest["config"]["train"]["epochs"] for name in ("mask-2x", "distill-2x")]
    assert epochs == [1, 3]
    assert stages["mask-2x"].manifest["config"]["train"]["schedule"] == "constant"


def test_a_finished_gradual_run_is_skipped(gradual_run):
    config, _ = gradual_run
    again = run_to_student(config)
    assert all(stage.skipped for stage in again.values())


def test_a_gradual_run_stopped_while_masking_ends_with_the_same_files(gradual_run, folder, monkeypatch):
    config, stages = gradual_run
    output = folder / f"stopped-{config.prune.masks}"
    shutil.copytree(config.output, output)
    for name in ("mask-2x", "distill-2x"):
        shutil.rmtree(output / name)
    config = replace(config, output=str(output))
    with monkeypatch.context() as patch:
        killed_at(6, patch)
        with pytest.raises(Killed):
            run_to_student(config)
    again = run_to_student(config)
    for name in ("mask-2x", "distill-2x"):
        assert not again[name].skipped
        assert again[name].digest == stages[name].digest, name
    assert again["mask-2x"].manifest["resumed"]


@pytest.mark.slow
def test_each_round_prunes_further_and_the_last_reaches_the_target(stages_of_rounds):
    names = [f"distill-2x{suffix}" for suffix in ("-round1", "-round2", "")]
    costs = [COSTS.predict(read_model_sizes(stages_of_rounds[name])) for name in ("start", *names)]
    assert costs == sorted(costs, reverse=True)
    assert len(set(costs)) >= 3  # with so few units, the second round may already reach the final size
    for suffix in ("-round1", "-round2", ""):
        assert read_model_sizes(stages_of_rounds[f"distill-2x{suffix}"]) == read_sizes(
            stages_of_rounds[f"shape-2x{suffix}"]
        )
    assert costs[-1] == pytest.approx(costs[0] / 2, rel=0.05)
    epochs = [stages_of_rounds[name].manifest["config"]["train"]["epochs"] for name in names]
    assert epochs == [1, 1, 2]


@pytest.mark.slow
def test_rounds_follow_the_cubic_schedule(stages_of_rounds):
    begin = COSTS.predict(read_model_sizes(stages_of_rounds["start"]))
    for number in (1, 2):
        measured = shape_of(stages_of_rounds[f"shape-2x-round{number}"])
        assert measured["milliseconds"] == pytest.approx(interpolate_cubic(number, 0, 3, begin, begin / 2), rel=0.02)
        assert 0.85 * measured["milliseconds"] <= measured["predicted_ms"] <= measured["milliseconds"] * 1.001


@pytest.mark.slow
def test_importance_in_each_round_is_computed_on_the_trained_model(stages_of_rounds):
    for number, next_shape in ((1, "shape-2x-round2"), (2, "shape-2x")):
        scores = stages_of_rounds[f"scores-2x-round{number}"]
        assert scores.manifest["inputs"]["start"] == stages_of_rounds[f"distill-2x-round{number}"].digest
        inputs_of_shape = stages_of_rounds[next_shape].manifest["inputs"]
        assert inputs_of_shape["scores"] == scores.digest
        assert inputs_of_shape["start"] == stages_of_rounds[f"distill-2x-round{number}"].digest


@pytest.mark.slow
def test_a_run_stopped_in_a_round_ends_with_the_same_files(stages_of_rounds, folder, monkeypatch):
    output = folder / "stopped-rounds"
    shutil.copytree(folder / "run", output)
    for name in ("scores-2x-round1", "shape-2x-round2", "distill-2x-round2", "distill-2x"):
        shutil.rmtree(output / name)
    config = settings(folder, "stopped-rounds", schedule="iterative", rounds=3)
    with monkeypatch.context() as patch:
        killed_at(6, patch)
        with pytest.raises(Killed):
            run_to_student(config)
    again = run_to_student(config)
    assert again["distill-2x-round1"].skipped
    assert again["distill-2x-round2"].manifest["resumed"]
    assert {name: stage.digest for name, stage in again.items()} == {n: s.digest for n, s in stages_of_rounds.items()}


@pytest.mark.parametrize(("epochs", "rounds", "shares"), [(6, 3, [2, 2, 2]), (7, 3, [2, 2, 3]), (5, 3, [1, 2, 2])])
def test_all_epochs_are_distributed_over_the_rounds(epochs, rounds, shares):
    assert split_epochs(epochs, rounds) == shares


ONE, TWO = Layout(), Layout(dp=2)


def apply_rules(config: DistillConfig, precision: str, layout: Layout) -> None:
    task, processes = "text-classification", layout.processes
    check_rules(
        Facts(
            fill_defaults(config), processes, task, teacher_layout=layout, student_layout=layout,
            finetuning_layout=layout, precision=precision,
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "layout", "precision", "message"),
    [
        ({"epochs": 1, "schedule": "gradual"}, ONE, "32", "train.epochs 1: expected at least 2"),
        ({"epochs": 2, "schedule": "iterative", "rounds": 3}, ONE, "32", "train.epochs 2: expected at least 3"),
        ({"schedule": "gradual"}, TWO, "32", "expected one process, found 2"),
        *(
            ({"schedule": "gradual"}, ONE, name, f"schedule gradual: expected precision 32 or bf16-mixed, found {name}")
            for name in ("16-mixed", "bf16-stochastic", "int8-mixed", "fp8")
        ),
    ],
)
def test_schedules_with_unsupported_settings_are_rejected(folder, change, layout, precision, message):
    with pytest.raises(InputError, match=message):
        apply_rules(settings(folder, "run", **change), precision, layout)


def test_quantization_on_several_processes_is_rejected(folder):
    config = replace(settings(folder, "run"), quantize=QuantizeConfig(scheme="int8"))
    apply_rules(config, "32", ONE)
    with pytest.raises(InputError, match="quantize: expected one process, found 2"):
        apply_rules(config, "32", TWO)


@pytest.mark.parametrize("task", ["multi-label", "question-answering"])
def test_pipeline_stages_are_rejected_for_tasks_that_they_do_not_support(folder, task):
    unpruned = replace(settings(folder, "run"), budget=Budget(), prune=PruneConfig())
    staged, plan = Layout(pp=2), resolve(unpruned, 1)
    config = replace(plan.settings, task=task)

    def check(config: DistillConfig, layouts: Layouts) -> None:
        check_pipeline_stages(replace(plan, settings=config, layouts=layouts))

    check(config, Layouts(staged, ONE, ONE))
    check(replace(config, task="token-classification"), Layouts(ONE, staged, staged))
    with pytest.raises(InputError, match=f"student.layout pp=2: expected no pipeline stages for {task}, found 2"):
        check(config, Layouts(ONE, staged, ONE))
    for finetune in ("auto", "always"):  # the classifier counts as a headless body for question answering
        tuned = replace(config, teacher=replace(config.teacher, finetune=finetune))
        if finetune == "auto" and task == "multi-label":
            check(tuned, Layouts(staged, ONE, staged))
            continue
        with pytest.raises(InputError, match=f"teacher.layout pp=2: expected no pipeline stages for {task}"):
            check(tuned, Layouts(staged, ONE, staged))
    never = replace(config, teacher=replace(config.teacher, finetune="never"))
    check(never, Layouts(staged, ONE, staged))


def test_schedules_with_supported_settings_are_accepted(folder):
    for schedule in ("oneshot", "iterative"):
        apply_rules(settings(folder, "run", schedule=schedule), "16-mixed", TWO)
    apply_rules(settings(folder, "run", epochs=2, schedule="gradual"), "bf16-mixed", ONE)


@pytest.mark.slow
def test_a_model_that_is_already_fast_enough_is_left_unchanged(folder: Path):
    config = replace(settings(folder, "uncut"), budget=Budget(latency_ms=1e4, runtime="pytorch", precision="fp32"))
    stages = run_to_student(config)
    before = load_model_folder(stages["start"].folder / "model")
    after = load_model_folder(
        next(stage for name, stage in stages.items() if name.startswith("distill")).folder / "model"
    )
    assert after.state_dict().keys() == before.state_dict().keys()
    assert all(torch.equal(weight, before.state_dict()[name]) for name, weight in after.state_dict().items())
    metrics = next(stage for name, stage in stages.items() if name.startswith("distill")).metrics
    assert metrics["epochs"] == 0
    assert 0 < metrics["val/score"] <= 1
