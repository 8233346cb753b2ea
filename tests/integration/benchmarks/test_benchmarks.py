"""The state that benchmarks reuse between calls: the settings of a folder and the checkpoints of its runs."""

import argparse
import importlib
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.cache import cached_students, speed
from benchmarks.common.results_folder import Results, check_settings, find_checkpoint, find_only_checkpoint
from benchmarks.pruning.sparse_students import Experiment
from benchmarks.quantization import quantized_students
from benchmarks.students import recipes, two_teachers
from benchmarks.students.recipes import RecipeStudent
from support.commands import ROOT


def create_stage_folder(output: Path, stage: str, key: str, time: int) -> Path:
    """Creates a stage's folder with a checkpoint and the given modification time."""
    folder = output / stage / key
    (folder / "model").mkdir(parents=True)
    os.utime(folder, (time, time))
    return folder


def report(output: Path, **stages: Path) -> None:
    rows = [{"name": name, "folder": str(folder)} for name, folder in stages.items()]
    (output / "report.json").write_text(json.dumps({"stages": rows}))


def test_the_checkpoint_of_the_report_is_used_instead_of_the_newest(tmp_path: Path):
    """After runs with settings A, B and A again, which is skipped, the checkpoint of B is the newest."""
    first = create_stage_folder(tmp_path, "distill", "a", 1)
    create_stage_folder(tmp_path, "distill", "b", 2)
    report(tmp_path, distill=first)
    assert find_checkpoint(tmp_path, "distill") == first / "model"


def test_the_student_of_the_report_is_quantized_instead_of_the_newest(tmp_path: Path, monkeypatch):
    floats, requested = tmp_path / "seed-0" / "float", []
    stages = {name: create_stage_folder(floats, name, "a", 1) for name in ("teacher", "distill")}
    for name in stages:
        create_stage_folder(floats, name, "b", 2)
    report(floats, **stages)
    rounded = tmp_path / "seed-0" / "int8-static-ptq"
    rounded.mkdir()
    report(rounded)
    monkeypatch.setattr(quantized_students, "run_command", lambda module, *arguments: requested.extend(arguments))
    options = argparse.Namespace(output=str(tmp_path), formats=["onnx"], config="c", data="d", more=[], rounds=1)
    quantized_students.quantize_student(options, 0, "int8-static", "ptq", floats)
    checkpoints = [requested[requested.index(word) + 1] for word in ("--model", "--teacher")]
    assert checkpoints == [str(stages[name] / "model") for name in ("distill", "teacher")]


def test_the_teacher_of_the_report_is_timed_beside_one_of_another_data_set(tmp_path: Path, monkeypatch):
    """With `--data a/ b/`, the first run on b contains the teacher of a beside its own."""
    texts = tmp_path / "b"
    texts.mkdir()
    for split, count in (("train", 20), ("test", 4)):
        lines = [f"word number {i},{'yn'[i % 2]}\n" for i in range(count)]
        (texts / f"{split}.csv").write_text("text,label\n" + "".join(lines))
    output = tmp_path / "out" / "b" / "tinybert"
    stages = {
        "teacher": create_stage_folder(output, "teacher", "own", 1),
        "distill": create_stage_folder(output, "distill", "own", 1),
    }
    create_stage_folder(output, "teacher", "of-a", 2)
    report(output, **stages)
    requested = []
    monkeypatch.setattr(recipes, "load_model", lambda folder: requested.append(folder))
    monkeypatch.setattr(recipes, "load_tokenizer", lambda folder: None)
    monkeypatch.setattr(recipes, "build_timed", lambda *_: None)
    monkeypatch.setattr(recipes, "time_together", lambda built, *_: list(built))
    options = argparse.Namespace(seed=0, rounds=1)
    folders = {RecipeStudent("tinybert").name: output}
    assert recipes.measure_latencies(options, str(texts), folders) == ["teacher", "tinybert"]
    assert requested == [stages["teacher"] / "model", stages["distill"] / "model"]


PASSING_ON = [path for path in sorted(ROOT.glob("benchmarks/*/*.py")) if "= PassThroughParser(" in path.read_text()]


def test_only_the_shared_parser_passes_arguments_on():
    assert len(PASSING_ON) >= 9
    parsers = [path for path in ROOT.glob("benchmarks/**/*.py") if "parse_known_args" in path.read_text()]
    assert parsers == [ROOT / "benchmarks" / "common" / "command.py"]


@pytest.mark.parametrize("path", PASSING_ON, ids=lambda path: path.stem)
def test_arguments_that_are_passed_on_are_not_taken_for_abbreviations(path: Path, monkeypatch: pytest.MonkeyPatch):
    """`--teacher` of a run would be taken for `--teachers` of a benchmark."""

    class ParsedError(Exception):
        pass

    def parse_only(parser: argparse.ArgumentParser) -> None:
        assert not parser.allow_abbrev
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_only)
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    with pytest.raises(ParsedError):
        importlib.import_module(module).main()


def test_the_model_whose_cache_is_timed_is_named(tmp_path: Path):
    options = argparse.Namespace(lm=str(tmp_path), layers=3, width=64)
    assert speed.describe_model(options) == "random weights, 3 x 64"
    (tmp_path / "model").mkdir()
    assert speed.describe_model(options) == str(tmp_path)


def test_several_checkpoints_are_rejected_where_one_is_expected(tmp_path: Path):
    only = create_stage_folder(tmp_path, "teacher", "a", 1)
    assert find_only_checkpoint(tmp_path, "teacher") == only / "model"
    create_stage_folder(tmp_path, "teacher", "b", 2)
    with pytest.raises(SystemExit, match="expected one checkpoint, found 2"):
        find_only_checkpoint(tmp_path, "teacher")


def test_results_of_other_settings_are_rejected(tmp_path: Path):
    def build_options(**changes: object) -> argparse.Namespace:
        return argparse.Namespace(**{"output": str(tmp_path), "layers": 2, "seeds": [0]} | changes)

    check_settings(tmp_path, build_options(layers=9), free=("seeds",))
    check_settings(tmp_path, build_options(), free=("seeds",))  # the first call left no results
    (tmp_path / "result").touch()
    check_settings(tmp_path, build_options(seeds=[1]), free=("seeds",))
    for changes in ({"layers": 3}, {"frozen": True}):
        with pytest.raises(SystemExit, match="was made with"):
            check_settings(tmp_path, build_options(**changes), free=("seeds",))


@pytest.fixture
def language_model(tmp_path: Path) -> Path:
    """A tiny language model in the layout that `benchmarks.tasks.small_lm` writes."""
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "lm" / "model")
    rows = np.random.default_rng(0).integers(0, 40, (16, 8)).astype(np.int32)
    for name in ("train", "dev"):
        np.save(tmp_path / "lm" / f"{name}.npy", rows)
    return tmp_path / "lm"


def test_cached_students_of_other_settings_are_rejected(language_model: Path, tmp_path: Path, monkeypatch):
    folders = ["--lm", str(language_model), "--output", str(tmp_path / "out")]
    arguments = ["cached_students", *folders, "--targets", "labels"]

    def run(*more: str) -> list[tuple[int, int]]:
        monkeypatch.setattr(sys, "argv", [*arguments, *more])
        cached_students.main()
        results = Results[cached_students.Result](tmp_path / "out").all
        return [(result["seed"], result["steps"]) for result in results]

    assert run("--steps", "1", "--seeds", "0") == [(0, 1)]
    assert run("--steps", "2", "--seeds", "0", "1") == [(0, 1), (0, 2), (1, 2)]
    for changed in (["--layers", "1"], ["--frozen"], ["--draws", "3"]):
        with pytest.raises(SystemExit, match=f"was made with {changed[0].strip('-')}"):
            run("--steps", "2", "--seeds", "0", *changed)


def test_sparse_students_of_another_teacher_or_data_set_are_rejected(
    headed_folder: Path, data_folder: Path, tmp_path: Path
):
    def setup(**changes: object) -> Experiment:
        settings = {"teacher": str(headed_folder), "data": str(data_folder), "student": "layers=1", "epochs": 1}
        more = {"learning_rate": 1e-3, "rounds": 1, "threads": 1, "output": str(tmp_path / "out")}
        return Experiment(argparse.Namespace(**settings | more | changes))

    setup().folder.mkdir()  # of results
    assert setup(epochs=2).folder != setup().folder
    for name in ("teacher", "data"):
        with pytest.raises(SystemExit, match=f"was made with {name}"):
            setup(**{name: str(tmp_path / "another")})


def test_students_of_two_teachers_with_other_settings_are_rejected(tmp_path: Path, monkeypatch):
    def run(options: argparse.Namespace, output: Path, *arguments: str) -> None:
        stage, key = arguments[arguments.index("--until") + 1], "-".join(options.more) or "key"
        for name in (stage, *(["ensemble"] if "--teacher.additional" in arguments else [])):
            (output / name / key / "model").mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr(two_teachers, "run_distill", run)
    monkeypatch.setattr(two_teachers, "measure_accuracy", lambda options, folder: 0.5)
    arguments = ["two_teachers", "--output", str(tmp_path), "--seeds"]
    for seeds in (["0"], ["0", "1"]):
        monkeypatch.setattr(sys, "argv", [*arguments, *seeds])
        two_teachers.main()
    for changed, named in ((["--mix", "confidence"], "mix"), (["--epochs", "3"], "more")):
        monkeypatch.setattr(sys, "argv", [*arguments, "0", *changed])
        with pytest.raises(SystemExit, match=f"was made with {named}"):
            two_teachers.main()
