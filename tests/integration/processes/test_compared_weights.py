"""The comparison of weights that the tests of layouts, replicas and machines use finds every kind of difference."""

import numpy as np
import pytest
import torch

from support.run_outputs import find_excess, weights_that_differ

WEIGHTS = {"first": torch.tensor([1.0, 2.0]), "second": torch.zeros(3)}


def test_weights_differ_beyond_the_tolerance():
    found = WEIGHTS | {"first": torch.tensor([1.0, 2.5])}
    assert weights_that_differ(found, WEIGHTS, 0.4) == {"first": 0.5}
    assert weights_that_differ(found, WEIGHTS, 0.5) == {}
    assert weights_that_differ(found, WEIGHTS, 0, ["second"]) == {}
    assert weights_that_differ({name: np.asarray(value) for name, value in found.items()}, WEIGHTS, 0.5) == {}


@pytest.mark.parametrize("where", [0, 1])
def test_a_weight_that_is_not_a_number_differs_even_from_itself(where):
    broken = torch.ones(2)
    broken[where] = float("nan")
    found = WEIGHTS | {"first": broken}
    assert weights_that_differ(found, WEIGHTS, 1e9).keys() == {"first"}
    assert weights_that_differ(found, found, 1e9).keys() == {"first"}


@pytest.mark.parametrize(
    ("found", "names"),
    [
        ({}, None),
        ({"first": WEIGHTS["first"]}, None),
        (WEIGHTS | {"third": torch.zeros(1)}, None),
        ({"first": WEIGHTS["first"]}, ["first", "second"]),
        (WEIGHTS, []),
        (WEIGHTS | {"first": torch.ones(1)}, None),
    ],
    ids=["none", "one missing", "one more", "a requested one missing", "none requested", "another shape"],
)
def test_nothing_to_compare_is_an_error(found, names):
    with pytest.raises(AssertionError):
        weights_that_differ(found, WEIGHTS, 1e9, names)


def test_nothing_to_compare_with_nothing_is_an_error():
    with pytest.raises(AssertionError, match="nothing to compare"):
        weights_that_differ({}, {}, 1e9)
    with pytest.raises(AssertionError, match="nothing to compare"):
        find_excess({}, 1.0)
