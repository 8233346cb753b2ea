"""Tests command-line flags, YAML config files and help texts."""

import subprocess
from pathlib import Path

import pytest

from distill.errors import InputError
from pipelines import cache, distill, evaluate, launch, quantize
from pipelines.runs import cli
from pipelines.settings.commands.distill import SHORT_OPTIONS, DistillConfig
from pipelines.settings.defaults import fill_defaults
from support.commands import command, rejected_as_written, rejection_of

NEEDED = ("--teacher", "T", "--data", "D", "--output", "O")


def parse(*arguments: str) -> DistillConfig:
    return cli.parse(DistillConfig, arguments, prog="pipelines.distill", about="", examples="", short=SHORT_OPTIONS)


@pytest.mark.parametrize("module", ["distill", "evaluate", "export", "report"])
def test_help_prints_examples_without_importing_torch(module: str):
    done = subprocess.run(command(module, "--help"), capture_output=True, text=True, check=True)
    assert f"python -m pipelines.{module} --" in done.stdout
    code = "import sys; sys.argv = ['x', '--help']\n"
    code += f"from pipelines import {module}\nfrom pipelines.runs import cli\n"
    code += f"try: cli.run({module}.main)\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    subprocess.run([command(module)[0], "-c", code], capture_output=True, check=True)


def test_help_shows_the_values_of_a_config_file_and_other_parsers_keep_their_defaults(tmp_path, capsys):
    file = tmp_path / "values.yaml"
    file.write_text("train.epochs: 4321\n")
    for arguments, shown in (("--config", str(file)), True), ((), False):
        with pytest.raises(SystemExit) as exit_error:
            parse(*arguments, "--help")
        assert exit_error.value.code == 0
        assert ("default: 4321" in " ".join(capsys.readouterr().out.split())) is shown


def test_short_names_dashes_and_switches_reach_the_nested_settings():
    config = parse(*NEEDED, "--batch-size", "7", "--learning-rate=0.5", "--dry-run", "--loss.ce", "0.25")
    assert (config.train.batch_size, config.train.learning_rate, config.dry_run, config.loss.ce) == (7, 0.5, True, 0.25)
    assert (config.teacher.model, config.data.path, config.output) == ("T", "D", "O")


def test_switches_need_no_value_but_accept_one():
    config = parse(
        *NEEDED, "--speedup", "4", "--uniform", "--quantize.learned_scales", "--quantize", "int8", "--dry-run"
    )
    assert (config.budget.uniform, config.quantize.learned_scales, config.dry_run) == (True, True, True)
    assert not parse(*NEEDED, "--speedup", "4", "--uniform", "false").budget.uniform


def test_the_default_precision_depends_on_the_runtime():
    onnxruntime, pytorch = (
        parse(*NEEDED, "--speedup", "4"),
        parse(*NEEDED, "--speedup", "4", "--budget.runtime", "pytorch"),
    )
    assert fill_defaults(pytorch).budget.precision == "fp32"
    assert fill_defaults(onnxruntime).budget.precision == "int8"


def test_the_default_student_depends_on_the_budget():
    assert fill_defaults(parse(*NEEDED)).student.spec == "distilbert"
    assert fill_defaults(parse(*NEEDED, "--speedup", "4")).student.spec == "teacher"


@pytest.mark.parametrize(
    ("arguments", "scheme", "teacher", "student"),
    [
        (["--model", "m", "--quantize", "int4-weights"], "int4-weights", "m", "teacher"),
        (["--model=m", "--quantize.scheme=int4-weights"], "int4-weights", "m", "teacher"),
        (["--teacher", "t", "--student", "s"], "int8", "t", "s"),
        (["--teacher.model", "t", "--model", "s", "--scheme", "auto"], "int8", "t", "s"),
    ],
)
def test_explicit_flags_win_over_the_defaults_of_quantize(arguments, scheme, teacher, student):
    expected = quantize.with_defaults([*arguments, "--data", "D", "--output", "O"])
    config = fill_defaults(
        cli.parse(DistillConfig, expected, prog="x", about="", examples="", short=quantize.QUANTIZE_SHORT)
    )
    assert (config.quantize.scheme, config.teacher.model, config.student.spec) == (scheme, teacher, student)
    assert config.quantize.min_score_share == (0.99 if "auto" in arguments else 0)


@pytest.mark.parametrize(
    ("content", "flags", "scheme", "teacher", "student"),
    [
        ("model: m\n", [], "int8", "m", "teacher"),
        ("student.spec: m\nteacher: t\n", [], "int8", "t", "m"),
        ("quantize: {scheme: int4-weights}\n", ["--model", "m"], "int4-weights", "m", "teacher"),
        ("teacher: t\n", ["--model", "m"], "int8", "t", "m"),
    ],
)
def test_settings_of_a_file_win_over_the_defaults_of_quantize(content, flags, scheme, teacher, student, tmp_path):
    (tmp_path / "a.yaml").write_text(f"{content}data: D\noutput: O\n")
    arguments = quantize.with_defaults(["--config", str(tmp_path / "a.yaml"), *flags])
    config = cli.parse(DistillConfig, arguments, prog="x", about="", examples="", short=quantize.QUANTIZE_SHORT)
    assert (config.quantize.scheme, config.teacher.model, config.student.spec) == (scheme, teacher, student)


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path):
    file = tmp_path / "a.yaml"
    file.write_text("teacher: T\ndata: {path: D, max_length: 64}\noutput: O\ntrain: {epochs: 9}\ntemperature: 3\n")
    config = parse("--config", str(file), "--epochs", "2")
    assert (config.train.epochs, config.data.max_length, config.loss.temperature) == (2, 64, 3)


def test_the_teachers_training_defaults_are_independent_of_the_students_flags():
    config = parse(*NEEDED, "--epochs", "11")
    assert config.teacher_train.epochs == 3


def test_the_error_for_an_unknown_yaml_key_names_the_nearest_key(tmp_path: Path):
    file = tmp_path / "a.yaml"
    file.write_text("train: {learnig_rate: 1}\n")
    with pytest.raises(InputError, match=r"unknown key 'train.learnig_rate'; the nearest is 'train.learning_rate'"):
        parse("--config", str(file))


def test_a_minimum_score_for_quantization_needs_no_speedup():
    settings = parse(*NEEDED, "--quantize", "int8", "--min-score-share", "0.9")
    assert fill_defaults(settings).quantize.min_score_share == 0.9


@pytest.mark.parametrize("content", ["[1, 2]", "a: [", "just words", b"output: \xff"])
def test_a_config_that_is_not_a_mapping_is_rejected(tmp_path: Path, content: str | bytes):
    file = tmp_path / "a.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match="a.yaml"):
        parse("--config", str(file))


def test_a_config_value_of_the_wrong_type_is_rejected_by_key(tmp_path: Path, monkeypatch, capsys):
    file = tmp_path / "a.yaml"
    file.write_text("epochs: abc\nlearning_rate: 1e-4\n")
    expected = rejection_of(distill, ("--config", str(file), *NEEDED), monkeypatch, capsys)
    assert 'key "train.epochs"' in expected
    assert "abc" in expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((*NEEDED, "--epochz", "3"), "the nearest is --train.epochs"),
        ((*NEEDED, "--epochs", "many"), "epochs"),
        ((*NEEDED, "--epochs", "0"), "train.epochs: expected at least 1, found 0"),
        ((*NEEDED, "--loss.kl", "0"), "nothing would be learnt"),
        ((*NEEDED, "--precision", "64"), "precision"),
        ((*NEEDED, "--export", "torchao"), "export torchao: expected a quantized model, found a student without"),
        (("--data", "D", "--output", "O"), "--teacher: missing"),
        (("--config", "/nowhere.yaml"), "can't be read"),
        ((*NEEDED, "--seed", "-1"), "seed: expected 0 to 4294967295, found -1"),
        ((*NEEDED, "--teacher_train.epochs", "0"), "teacher_train.epochs: expected at least 1, found 0"),
        ((*NEEDED, "--general.train.epochs", "0"), "general.train.epochs: expected at least 1, found 0"),
        (
            (*NEEDED, "--max-bytes", "1MB"),
            "budget.max_bytes: expected a speedup, latency_ms or texts_per_second with it",
        ),
        ((*NEEDED, "--uniform"), "budget.uniform: expected a speedup, latency_ms or texts_per_second with it"),
        (
            (*NEEDED, "--min-score-share", "0.9"),
            "budget.min_score_share: expected a speedup, latency_ms or texts_per_second with it",
        ),
        (
            (*NEEDED, "--budget.threads", "2"),
            "budget.threads: expected a speedup, latency_ms or",
        ),
        (
            (*NEEDED, "--prune.samples", "9"),
            "prune.samples: expected a speedup, latency_ms or",
        ),
        ((*NEEDED, "--prune.rounds", "2"), "prune.rounds: expected prune.schedule iterative with it, found oneshot"),
        (
            (*NEEDED, "--prune.schedule", "iterative", "--prune.masks", "learned"),
            "prune.masks: expected prune.schedule gradual with it, found iterative",
        ),
        (
            (*NEEDED, "--student", "teacher", "--student.trained", "--quantize", "int8", "--speedup", "4"),
            "budget: expected none with student.trained",
        ),
        (
            (*NEEDED, "--student", "teacher", "--speedup", "4", "--loss.attention", "1"),
            "loss.attention, loss.relations: expected 0 with a budget, found attention 1 and relations 0",
        ),
        (
            (*NEEDED, "--student", "teacher", "--speedup", "4", "--loss.hidden", "1", "--loss.layer_map", "skip"),
            "loss.layer_map skip: expected uniform, last, dynamic, learned with a budget",
        ),
        ((*NEEDED, "--machine.restarts", "3"), "machine.restarts 3: expected machine.devices of 2 or more, found 1"),
    ],
)
def test_invalid_settings_end_with_a_one_line_error(arguments, expected, monkeypatch, capsys):
    assert expected in rejection_of(distill, arguments, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("command", "arguments", "expected"),
    [
        (evaluate, ("--model", "M", "--data", "D", "--output", "s3://b/x"), "output 's3://b/x': expected a folder on"),
        (evaluate, ("--model", "M", "--data", "D", "--output", "O", "--processor", "avx2"), "expected --dynamic with"),
        (
            cache,
            ("write", "--teacher", "T", "--data", "D", "--cache", "C", "--signals", "auto,hidden"),
            "keep.signals: expected auto alone, or names among",
        ),
        (cache, ("inspect", "--cache", "C", "--student", "S"), "--student 'S': expected --fidelity with it"),
        (
            launch,
            ("slurm", "--hours", "2", "--volume", "/v", "--", "x"),
            "volume: expected only for ray",
        ),
        (launch, ("ray", "--hours", "2", "--", "x"), "hours: expected an image with it for ray"),
    ],
)
def test_settings_that_would_be_ignored_or_misread_are_rejected(command, arguments, expected, monkeypatch, capsys):
    assert expected in rejected_as_written(command, arguments, monkeypatch, capsys)
