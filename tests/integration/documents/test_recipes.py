"""Recipes in configs/: layout recipes fit their models, and tiny runs of the recipes train as specified."""

import csv
import importlib.util
import json
from pathlib import Path

import pytest
import torch.distributed as dist
from transformers import AutoModelForSequenceClassification

from distill.errors import InputError
from distill.losses.config import TERMS
from distill.parallel.layout import Layout
from pipelines import distill
from pipelines.runs.cli import parse
from pipelines.runs.strategies.deepspeed import build_settings
from pipelines.settings import layouts
from pipelines.settings.commands.distill import SHORT_OPTIONS, DistillConfig
from pipelines.settings.layouts import Layouts
from pipelines.settings.resolve import resolve
from support.commands import ROOT, small_run
from support.processes.ranks import free_port, run_ranks
from support.processes.training_ranks import set_torchrun_environment
from support.tiny_models import WORDS

RECIPES = sorted((ROOT / "configs" / "layouts").glob("*.yaml"))


def config_of(recipe: Path, *more: str) -> DistillConfig:
    arguments = ["--config", str(recipe), "--output", "unused", *more]
    return parse(DistillConfig, arguments, prog="pipelines.distill", about="", examples="", short=SHORT_OPTIONS)


def plan_layouts(*arguments: str) -> Layouts:
    config = config_of(ROOT / "configs" / "demo.yaml", *arguments)
    return resolve(config, config.machine.devices).layouts


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_the_layouts_of_a_recipe_fit_its_models(recipe, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = config_of(recipe)
    chosen = resolve(config, config.machine.devices).layouts
    assert chosen.student.processes + config.teacher.processes == config.machine.devices
    assert chosen.teacher.processes in (config.teacher.processes, config.machine.devices)
    assert chosen.teacher.processes > 1
    if config.teacher.layout != "auto":
        assert str(chosen.teacher) == config.teacher.layout
    if config.student.layout != "auto":
        assert str(chosen.student) == config.student.layout


def run_distill_rank(rank: int, processes: int, arguments: list[str], port: int, folder: Path) -> None:
    """Runs the command as one of its launched processes."""
    dist.destroy_process_group()
    set_torchrun_environment(rank, processes, port)
    distill.main(arguments)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ended", rank=rank, world_size=processes)


FORKED = [recipe for recipe in RECIPES if recipe.stem != "deepspeed"]  # launches its own processes: test_launch.py


@pytest.mark.slow
@pytest.mark.parametrize("recipe", FORKED, ids=[recipe.stem for recipe in FORKED])
def test_a_layout_recipe_trains_and_saves_a_stock_student(recipe, tmp_path, body_folder, data_folder):
    """Uses the recipe's layouts, frozen embeddings and no early stopping with a tiny teacher and few texts."""
    arguments = small_run(body_folder, data_folder, tmp_path / "run", "--config", str(recipe), "--until", "distill")
    arguments += ["--epochs", "1", "--teacher_train.epochs", "1", "--teacher_train.dropout", "0"]
    processes = config_of(recipe).machine.devices
    run_ranks(run_distill_rank, processes, processes, arguments, free_port(), tmp_path, limit=90)
    body, teacher, student = (
        AutoModelForSequenceClassification.from_pretrained(next(tmp_path.glob(pattern)))
        for pattern in ("body", "run/teacher/*/model", "run/distill/*/model")
    )
    assert (student.config.num_hidden_layers, student.config.num_labels) == (2, 5)
    for trained, before in ((teacher, body), (student, teacher)):
        assert trained.get_input_embeddings().weight.equal(before.get_input_embeddings().weight), "embeddings moved"
        one, other = (each.bert.encoder.layer[0].output.dense.weight for each in (trained, before))
        assert not one.equal(other), "nothing was trained"


@pytest.mark.parametrize(("memory", "expected"), [(1e12, Layout(dp=2)), (1e6, Layout(fsdp=2))])
def test_auto_replicates_models_that_fit_in_memory_and_shards_others(memory, expected, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(layouts, "process_memory", lambda processes: memory)
    chosen = plan_layouts("--devices", "2")
    assert chosen.teacher == chosen.student == chosen.finetuning == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--teacher.processes", "1"), "expected teacher.online true, found false"),
        (("--teacher.online", "true", "--teacher.processes", "2"), "expected fewer than the 2 processes"),
        (("--teacher.online", "true", "--teacher.processes", "-1"), "expected at least 0"),
        (("--strategy", "deepspeed_stage_4"), "expected deepspeed_stage_1, 2 or 3"),
        (("--strategy", "deepspeed_stage_2", "--student.layout", "fsdp=2"), "leave one of the two out"),
        (("--student.offload", "true", "--student.layout", "zero1"), "expected student.layout fsdp=N or zero2"),
    ],
)
def test_conflicting_layout_settings_are_rejected(arguments, expected, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(InputError, match=expected):
        plan_layouts("--devices", "2", *arguments)


def test_a_missing_deepspeed_is_rejected_with_the_package_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install -e '.\[deepspeed\]'"):
        build_settings("deepspeed_stage_3")


@pytest.mark.parametrize("key", ["optimizer", "gradient_clipping", "bf16"])
def test_a_deepspeed_file_with_keys_of_our_settings_is_rejected(key, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}, key: {}}))
    with pytest.raises(InputError, match=f"{key} is decided by --"):
        build_settings(str(file))


def test_other_settings_of_a_deepspeed_file_are_kept(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 7}}))
    assert build_settings(str(file))["zero_optimization"] == {"stage": 3, "stage3_max_live_parameters": 7}


# `sampled` is for language models: test_language_command.py
BY_NAME = sorted(each for each in (ROOT / "configs" / "recipes").glob("*.yaml") if each.stem != "sampled")


QUICK = ("tinybert",)
MARKED = [pytest.param(recipe, marks=[pytest.mark.slow] * (recipe.stem not in QUICK)) for recipe in BY_NAME]


@pytest.mark.parametrize("recipe", MARKED, ids=lambda recipe: recipe.stem)
def test_a_named_recipe_trains_with_exactly_its_loss_terms(recipe, tmp_path, body_folder, data_folder, monkeypatch):
    """Uses the recipe's objectives and preset with a tiny teacher and few texts."""
    arguments = small_run(body_folder, data_folder, tmp_path / "run", "--config", str(recipe), "--until", "distill")
    at = arguments.index("--student")
    del arguments[at : at + 2]  # the recipe's student is used
    arguments += ["--epochs", "2", "--teacher_train.epochs", "1"]
    if "ffn" in config_of(recipe).student.spec:
        arguments += ["--student", "layers=2,ffn=32"]  # the recipe's sizes are meant for the real teacher
    if config_of(recipe).general.data:
        prose = tmp_path / "prose.txt"
        prose.write_text(" ".join(WORDS * 20))
        arguments += ["--general.data", str(prose), "--general.length", "16", "--general.train.batch_size", "8"]
        arguments += ["--general.loss.relation_heads", "4", "--general.train.epochs", "1"]
    distill.main(arguments)
    config = config_of(recipe)
    wanted = {"general": config.general.loss} if config.general.data else {}
    for stage, loss in (wanted | {"distill": config.loss}).items():
        (log,) = (tmp_path / "run" / stage).rglob("metrics.csv")
        with log.open() as file:
            curve = [row for row in csv.DictReader(file) if row["train/loss"]]
        for term in TERMS:
            assert (f"train/{term}" in curve[0]) == (getattr(loss, term) > 0), term
    (model,) = (tmp_path / "run" / "distill").glob("*/model")
    own_code = "auto_map" in json.loads((model / "config.json").read_text())
    assert own_code == (recipe.stem == "static")
    student = AutoModelForSequenceClassification.from_pretrained(model, trust_remote_code=own_code)
    assert student.config.num_labels == 5
