"""`--config recipe:NAME` reads the recipe of that name, from any folder."""

import pytest
import yaml

from distill.errors import InputError
from pipelines.runs.cli import parse
from pipelines.settings import recipes
from pipelines.settings.commands.distill import SHORT_OPTIONS, DistillConfig
from support.commands import ROOT

ARGUMENTS = {"prog": "pipelines.distill", "about": "", "examples": "", "short": SHORT_OPTIONS}


def test_every_yaml_file_of_configs_has_a_name_of_its_own():
    files = sorted((ROOT / "configs").rglob("*.yaml"))
    assert sorted(recipes.find_recipes().values()) == files


def test_a_recipe_is_read_from_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["--config", "recipe:pruned", "--data", str(tmp_path), "--output", "out"]
    config = parse(DistillConfig, arguments, **ARGUMENTS)
    written = yaml.safe_load((ROOT / "configs" / "pruned.yaml").read_text())
    assert config.teacher.model == written["teacher"]
    assert config.data.path == str(tmp_path)


def test_an_installed_recipe_is_found_without_a_checkout(tmp_path, monkeypatch):
    folder = tmp_path / "share" / "stillroom" / "configs"
    folder.mkdir(parents=True)
    (folder / "demo.yaml").write_text("seed: 5\n")
    monkeypatch.setattr(recipes, "CHECKOUT", tmp_path / "none")
    monkeypatch.setattr(recipes.sysconfig, "get_path", lambda name: str(tmp_path))
    assert recipes.recipe_file("recipe:demo") == str(folder / "demo.yaml")


def test_an_unknown_recipe_is_rejected_with_the_nearest():
    with pytest.raises(InputError, match="no recipe of that name; did you mean recipe:pruned"):
        recipes.recipe_file("recipe:prune")
    with pytest.raises(InputError, match="there are decoupled, deepspeed, demo"):
        recipes.recipe_file("recipe:xyz")


def test_a_path_is_left_as_it_is():
    assert recipes.recipe_file("configs/demo.yaml") == "configs/demo.yaml"
