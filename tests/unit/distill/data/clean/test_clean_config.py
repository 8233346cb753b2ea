"""Tests of the list of cleaning steps."""

import pytest

from distill.data.clean.config import (
    CLEANING_STEPS,
    STANDARD,
    CleanConfig,
    CleaningStep,
    check_clean_packages,
    format_step,
    parse_steps,
    read_length,
)
from distill.errors import InputError


def test_steps_are_applied_in_a_fixed_order_with_their_values():
    steps = parse_steps("near-duplicates=0.8, urls, encoding")
    assert steps == (CleaningStep("encoding", ""), CleaningStep("urls", "mask"), CleaningStep("near-duplicates", "0.8"))
    assert [format_step(step) for step in steps] == ["encoding", "urls", "near-duplicates=0.8"]


def test_standard_stands_for_its_steps_and_each_can_be_changed_or_left_out():
    assert [step.name for step in parse_steps("standard")] == sorted(
        STANDARD.split(","), key=list(CLEANING_STEPS).index
    )
    changed = dict(parse_steps("standard,language=off,near-duplicates=0.7,case"))
    assert "language" not in changed
    assert (changed["near-duplicates"], changed["case"]) == ("0.7", "lower")
    assert dict(parse_steps("near-duplicates=0.7,standard"))["near-duplicates"] == "0.7"


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ("standrad", "found 'standrad'; did you mean 'standard'?"),
        ("urls,urls=drop", "step 'urls' is given twice"),
        ("urls=hide", "step urls: expected mask or drop, found 'hide'"),
        ("html=yes", "step html: expected no value, found 'yes'"),
        ("length=3", "expected MIN:MAX words, such as 3:200, found '3'"),
        ("length=9:3", "no row would be left"),
        ("near-duplicates=0.1", "step near-duplicates: expected a number from 0.5 to 1, found '0.1'"),
        ("symbols=many", "step symbols: expected a number from 0 to 1, found 'many'"),
    ],
)
def test_unknown_steps_and_values_are_rejected_by_name(steps, message):
    with pytest.raises(InputError) as error:
        CleanConfig(steps=steps)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("deploy", "message"),
    [
        ("duplicates", "expected steps that change texts, found 'duplicates'"),
        ("case", "expected steps of data.clean, found 'case'"),
        ("urls=drop", "expected steps of data.clean, found 'urls=drop'"),
    ],
)
def test_steps_of_deployment_are_steps_of_training_that_change_texts(deploy, message):
    with pytest.raises(InputError) as error:
        CleanConfig(steps="duplicates,urls", deploy=deploy)
    assert message in str(error.value)
    assert CleanConfig(steps="duplicates,urls", deploy="urls").find_deployed() == (CleaningStep("urls", "mask"),)


def test_a_single_fold_is_rejected():
    with pytest.raises(InputError, match=r"data.clean.folds: expected at least 2, found 1"):
        CleanConfig(folds=1)


def test_limits_of_length_may_be_open():
    assert (read_length("3:"), read_length(":200"), read_length("3:200")) == ((3, None), (1, 200), (3, 200))


def test_a_step_whose_package_is_missing_is_rejected_by_name(monkeypatch):
    monkeypatch.setattr("distill.data.clean.config.find_spec", lambda name: None if name == "ftfy" else name)
    check_clean_packages(parse_steps("html,language"))
    with pytest.raises(InputError, match="step encoding: expected the package ftfy, found none; install it with"):
        check_clean_packages(parse_steps("standard"))
