"""Opens cascades and their members as the functions that are timed; importing this file loads no torch."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from compress.cascade.reader import Cascade, Member
from compress.measure.latency import Runner, TimedInputs


def open_with_margin(folder: Path, threads: int, multi_label: bool) -> Runner[TimedInputs]:
    """Opens a member as a function of a text's inputs that computes its logits and margin."""
    return partial(_measure_margin, Member(folder, threads=threads), multi_label)


def _measure_margin(member: Member, multi_label: bool, inputs: TimedInputs) -> np.floating[Any]:
    margin: np.floating[Any] = member.measure_margin(member(inputs), multi_label)
    return margin


def open_cascade(folder: Path, threads: int) -> Runner[Any]:
    """Opens a cascade as a function of a text's inputs for each member."""
    runner: Runner[Any] = Cascade(folder, threads).answer
    return runner
