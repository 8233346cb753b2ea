"""A replica of a student: what its process is told, and what it leaves behind."""

import json
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import TypedDict

from torch import nn

from pipelines.runs.files import write_json
from pipelines.runs.training_checkpoint import load_weights, save_weights

OUTCOME, WEIGHTS = "outcome.json", "weights"
START_SECONDS = 600.0  # that a replica waits for the others to be ready


class Outcome(TypedDict):
    """What a replica reports at its end."""

    steps: int  # of its optimizer
    seconds: float  # of training
    averagings: int  # that took place; 0 with shared weights
    sent_bytes: int  # of weights or changes that it contributed to them


@dataclass(frozen=True)
class Replica:
    """One of several processes that train the same student.

    Args:
        index: From 0.
        count: Number of replicas.
        folder: Where this replica keeps its checkpoints, logs and outcome.
        shared: Folder of all replicas.
        lighthouse: Address at which replicas that are averaged find each other.
        is_restarted: Whether it replaces one that died while others went on.
        ready: Set by the replica when it could start to train.
        go: Set when all replicas are ready.
    """

    index: int
    count: int
    folder: Path
    shared: Path
    lighthouse: str
    is_restarted: bool
    ready: Event
    go: Event

    @property
    def name(self) -> str:
        """The replica in messages."""
        return f"replica {self.index}"

    def wait_for_start(self) -> None:
        """Returns when all replicas are ready to train.

        Raises:
            TimeoutError: They aren't after `START_SECONDS`.
        """
        self.ready.set()
        if not self.go.wait(START_SECONDS):
            raise TimeoutError(f"{self.name} waited {START_SECONDS:.0f} s for the other replicas to start")

    def finish(self, module: nn.Module, outcome: Outcome) -> None:
        """Writes the trained weights and the outcome; the latter last, as the sign that both are complete."""
        save_weights(self.folder / WEIGHTS, module)
        write_json(self.folder / OUTCOME, outcome)


def list_trained(module: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters that training changes."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def name_folder(shared: Path, index: int) -> Path:
    """Returns the folder of a replica."""
    return shared / f"replica-{index}"


def read_outcomes(shared: Path, count: int) -> dict[int, Outcome]:
    """Returns the outcomes of the replicas that finished, by index."""
    files = {index: name_folder(shared, index) / OUTCOME for index in range(count)}
    return {index: json.loads(file.read_text()) for index, file in files.items() if file.exists()}


def load_result(shared: Path, index: int, module: nn.Module) -> None:
    """Loads the weights of a finished replica."""
    load_weights(name_folder(shared, index) / WEIGHTS, module)
