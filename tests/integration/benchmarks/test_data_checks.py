"""Benchmarks that share a teacher between seeds, or score a split themselves, reject data that would mislead them."""

import argparse
from pathlib import Path

import pytest

from benchmarks.common.data_checks import check_shared_teacher, reject_data_settings
from benchmarks.students.two_teachers import check_scored_data
from support.run_inputs import make_classifier_inputs, write_csv
from support.tiny_models import make_rows


@pytest.fixture
def inputs(tmp_path: Path) -> tuple[Path, Path]:
    """A classifier, and data that has no test split."""
    model, data = make_classifier_inputs(tmp_path)
    (data / "test.csv").unlink()
    return model, data


def arguments_of(inputs: tuple[Path, Path], *more: str) -> list[str]:
    model, data = inputs
    return ["--teacher", str(model), "--data", str(data), "--student", "teacher", "--speedup", "2", *more]


def test_a_teacher_of_another_seed_needs_a_test_split(inputs, tmp_path):
    output = tmp_path / "out"
    check_shared_teacher(arguments_of(inputs), [0], output)
    check_shared_teacher(arguments_of(inputs), [], output)
    for seeds in ([1], [0, 1]):
        with pytest.raises(SystemExit, match=r"expected a test split of its own, found 10 rows held out .*--seeds 0"):
            check_shared_teacher(arguments_of(inputs), seeds, output)
    assert not output.exists()
    write_csv(inputs[1] / "validation.csv", make_rows(20, 3))
    check_shared_teacher(arguments_of(inputs, "--data.test_split", "validation"), [1], output)
    write_csv(inputs[1] / "test.csv", make_rows(20, 2))
    check_shared_teacher(arguments_of(inputs, "--speedup", "3"), [0, 1], output)  # of a repeated flag the last counts


def test_a_benchmark_that_scores_the_test_split_itself_needs_one(inputs):
    options = argparse.Namespace(data=str(inputs[1]), more=["--epochs", "1"])
    with pytest.raises(SystemExit, match="expected a test split of its own"):
        check_scored_data(options)
    write_csv(inputs[1] / "test.csv", make_rows(20, 2))
    check_scored_data(options)
    options.more += ["--data.label=topic"]
    with pytest.raises(SystemExit, match="--data.label=topic: expected no setting of the data"):
        check_scored_data(options)


def test_a_setting_of_the_data_is_rejected_unless_it_is_allowed():
    arguments = ["--epochs", "2", "--data.max-length", "32"]
    reject_data_settings(arguments, "of other rows", allowed=("--data.max_length",))
    with pytest.raises(SystemExit, match=r"--data.max-length: expected no setting of the data: of other rows"):
        reject_data_settings(arguments, "of other rows")
