"""The models that are evaluated, and the keys of their entries."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, cast

from compress.export.common.targets import ExportTarget, find_target
from pipelines.reports.schema import TargetSpeed
from pipelines.runs.manifest import JsonObject
from pipelines.runs.stage import Artefact
from pipelines.stages.deliver.speed import SPEED

Key: TypeAlias = tuple[str, str, str]  # name, runtime, precision


@dataclass(frozen=True)
class RequestedSpeed:
    """The measured speed of a student with a requested speed.

    Args:
        target: The export target that the budget is about.
        stage: The stage that measured it.
        retries: How often the student was pruned again because it was too slow.
        reason: Why it wasn't pruned again although it is slow; empty if it isn't.
    """

    target: ExportTarget
    stage: Artefact
    retries: int
    reason: str

    def read(self) -> TargetSpeed:
        """Returns the record of the measurement."""
        record = json.loads((self.stage.folder / SPEED).read_text())
        return cast(TargetSpeed, record | {"retries": self.retries, "reason": self.reason})


@dataclass(frozen=True)
class EvaluatedModel:
    """A model to measure: its role, the stage that built it, and its export.

    `scored` is the target whose validation score is compared with the required minimum, `speed` the measurement of the
    requested speed.
    """

    name: str
    stage: str
    export: Artefact
    scored: ExportTarget | None = None
    speed: RequestedSpeed | None = None

    @property
    def targets(self) -> list[ExportTarget]:
        """Targets of its export that are measured."""
        proven = [find_target(proof["target"]) for proof in self.export.metrics["parity"]]
        return [target for target in proven if target.measured]

    def path(self, target: ExportTarget) -> Path:
        """Returns the folder of an exported target."""
        return self.export.folder / str(target)


def read_key(entry: JsonObject) -> Key:
    """Returns the model, runtime and precision of an entry."""
    return entry["name"], entry["runtime"], entry["precision"]
