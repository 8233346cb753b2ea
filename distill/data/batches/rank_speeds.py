"""How fast the processes of a training compute, by which the rows of its batches are divided."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from distill.errors import InputError

MEASURED_SPEEDS = "auto"


class RankSpeeds:
    """The speeds of all processes, from one batch to the next; every process has the same.

    Args:
        speeds: Tokens that each process computes in some time; only their ratios matter.
    """

    def __init__(self, speeds: Sequence[float]):
        self.starts, self.speeds = [0], [tuple(speeds)]

    @property
    def newest(self) -> tuple[float, ...]:
        """The speeds that were set last."""
        return self.speeds[-1]

    def find(self, position: int) -> tuple[float, ...]:
        """Returns the speeds for a batch, whose number counts from the start of the training."""
        return self.speeds[bisect_right(self.starts, position) - 1]

    def change(self, position: int, speeds: Sequence[float]) -> None:
        """Sets the speeds from a batch on, which no process has prepared yet."""
        self.speeds.append(tuple(speeds))  # first: threads that prepare batches read them by their starts
        self.starts.append(max(position, self.starts[-1]))

    def state_dict(self) -> dict[str, Any]:
        """Returns all changes, so that a resumed training divides its batches in the same way."""
        return {"starts": list(self.starts), "speeds": [list(each) for each in self.speeds]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned; with another number of processes it is of no use."""
        if len(state["speeds"][-1]) == len(self.newest):
            self.starts, self.speeds = list(state["starts"]), [tuple(each) for each in state["speeds"]]


def parse_speeds(text: str, replicas: int) -> RankSpeeds | None:
    """Returns the speeds that `machine.rank_speeds` names; None if it names none.

    Raises:
        InputError: They are no numbers above 0, or not one for each replica.
    """
    if not text:
        return None
    if text == MEASURED_SPEEDS:
        return RankSpeeds([1.0] * replicas)
    try:
        speeds = [float(each) for each in text.split(",")]
    except ValueError:
        speeds = []
    if len(speeds) != replicas or min(speeds) <= 0:
        raise InputError(
            f"machine.rank_speeds: expected auto, or {replicas} numbers above 0 separated by commas, one for each "
            f"replica, found {text!r}"
        )
    return RankSpeeds(speeds)
