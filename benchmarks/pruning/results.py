"""The layout of the results of `benchmarks.pruning.pruned_students`, as in its results.json."""

from collections.abc import Sequence
from typing import TypedDict

from pipelines.reports.schema import LatencyEntry
from pipelines.runs.manifest import JsonObject


class Scores(TypedDict):
    """The accuracy of a deployed file on two splits."""

    validation: float
    test: float


class ModelSize(TypedDict):
    """Parameters, those without the token embeddings (which cost no time), and the bytes of the deployed files."""

    params: int
    without_embeddings: int
    bytes: int


class StudentResult(Scores, ModelSize):
    """A student that was trained in one of the methods."""

    method: str
    seed: int
    rate: float
    size: JsonObject
    label: str
    seconds: float
    search_seconds: float


class TriedStudent(StudentResult):
    """A student, its folder, and whether it is one of those that are compared."""

    folder: str
    selected: bool


class MeasuredStudent(TriedStudent):
    """A student whose speed was measured."""

    speedup: float
    latency: LatencyEntry


class TeacherResult(Scores, ModelSize):
    """The teacher on the same runtime."""

    latency: LatencyEntry


class Results(TypedDict):
    """All results; `teacher_again` is the speedup of the teacher's second copy."""

    settings: JsonObject
    machine: JsonObject
    teacher: TeacherResult
    teacher_again: float
    students: Sequence[MeasuredStudent]
    tried: Sequence[TriedStudent]
