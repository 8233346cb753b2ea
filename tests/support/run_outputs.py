"""Results of runs and trainings: the weights of a run's student, and comparisons of weights."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from pipelines.runs.manifest import hash_file


def find_student(output: Path) -> Path:
    """Returns the file with the weights of the only student that a run has trained."""
    (file,) = output.glob("distill/*/model/model.safetensors")
    return file


def read_weights(output: Path) -> dict[str, Tensor]:
    return load_file(find_student(output))


def student_hash(output: Path) -> str:
    return hash_file(find_student(output))


def weights_that_differ(
    found: Mapping[str, Any], expected: Mapping[str, Any], tolerance: float, names: Collection[str] | None = None
) -> dict[str, float]:
    """Returns the weights that aren't equal up to the tolerance, with their largest absolute difference.

    Args:
        found: Weights by name: tensors or arrays. They must be of the shapes that are expected.
        expected: What they should be.
        tolerance: Largest absolute difference of equal weights; 0 for identical ones. NaN differs from everything.
        names: Weights to compare, which both must have. None: all, and both must have the same.
    """
    if names is None:
        assert found.keys() == expected.keys()
        names = found.keys()
    assert set(names) <= found.keys() & expected.keys()
    return find_excess({name: largest_difference(found[name], expected[name]) for name in names}, tolerance)


def largest_difference(one: Any, other: Any) -> float:
    one, other = torch.as_tensor(one), torch.as_tensor(other)
    assert one.shape == other.shape
    return float((one.double() - other.double()).abs().max())


def find_excess(differences: Mapping[str, float], tolerance: float) -> dict[str, float]:
    """Returns the differences that aren't at most the tolerance, among them NaN; there must be some to check."""
    assert differences, "there is nothing to compare"
    return {name: difference for name, difference in differences.items() if not difference <= tolerance}
