"""The budget of a pruned model: speed, size and minimum score, and the conditions under which they are measured."""

import re
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import pairwise
from typing import Literal

from compress.errors import CompressError

UNITS = {"": 1, "b": 1, "kb": 1000, "mb": 1000**2, "gb": 1000**3, "kib": 1024, "mib": 1024**2, "gib": 1024**3}
_TARGETS = ("speedup", "latency_ms", "texts_per_second")
_RUNTIMES = ("onnxruntime", "openvino", "pytorch")
ROUNDS = 20
FRONTIER = "2,4,8,16,32,64,128"  # speed-ups of a frontier where none are given
TOLERANCE = 0.05  # accepted relative deviation from the requested speed; being faster would cost accuracy
THROUGHPUT_BATCH = 32  # default number of texts per call of a budget in texts per second


@dataclass(frozen=True)
class Budget:
    """Settings of a measured budget; nothing is pruned unless a speed-up, a latency or a throughput is set.

    Args:
        speedup: Required speed-up over the teacher in fp32 on the same runtime, such as 10; a comma-separated list,
            such as 2,4,8,15, gives a family of students.
        latency_ms: Maximum milliseconds per call, instead of a speed-up.
        texts_per_second: Minimum throughput in calls of `batch` texts, instead of a speed-up.
        max_bytes: Maximum size of the deployed files, such as 10MB; for a family one bound for all, or one for each
            speed-up in the same order, such as 14MB,10MB,8MB.
        min_score_share: Minimum share of the teacher's score on the validation split, such as 0.98.
        runtime: Runtime on which latency is measured: onnxruntime, pytorch, or openvino (an extra).
        precision: Precision of the student: int8 (dynamic, on ONNX Runtime) or fp32; auto selects int8 on onnxruntime
            and fp32 elsewhere. The teacher is always measured in fp32.
        batch: Texts per call; 0 is 1, or 32 with texts_per_second.
        length: Tokens per text; 0 uses the lengths of the data set. With several, such as 16,64,256, the speed must
            hold for texts of each.
        threads: Threads of the runtime.
        rounds: Number of timed runs of each measured size on each text, at least 1; candidate students are run three
            times as often, beside the teacher. If that takes more than a minute, as with long texts, there are fewer
            runs, at least 10.
        retries: Maximum number of times that a student is pruned further and trained again because it is more than 5 %
            slower than requested.
        uniform: Give every layer the same sizes, so that the checkpoint loads in its stock transformers class.
        frontier: Train a student for each speed-up 2, 4, 8, ..., 128, or for each in `speedup`, that a pruned model
            reaches, and the students without attention in `student.attention_free`.
    """

    speedup: str = ""
    latency_ms: float = 0.0
    texts_per_second: float = 0.0
    max_bytes: str = ""
    min_score_share: float = 0.0
    runtime: str = "onnxruntime"
    precision: Literal["auto", "int8", "fp32"] = "auto"
    batch: int = 0
    length: str = "0"
    threads: int = 1
    rounds: int = ROUNDS
    retries: int = 2
    uniform: bool = False
    frontier: bool = False

    def __post_init__(self) -> None:
        goals = [name for name in _TARGETS if getattr(self, name)]
        if len(goals) > 1:
            raise CompressError(
                f"budget: expected one of a speed-up, a latency and a throughput, found {' and '.join(goals)}: all but "
                "one of them would be ignored"
            )
        if self.frontier and goals not in ([], ["speedup"]):
            raise CompressError(
                f"budget.frontier: expected speed-ups or nothing else, found {goals[0]}: a frontier has several speeds"
            )
        if any(each <= 1 for each in self.speedups):
            raise CompressError(
                f"budget.speedup: expected more than 1, found {self.speedup}: the teacher itself is that fast"
            )
        for name in ("latency_ms", "texts_per_second"):
            if getattr(self, name) < 0:
                raise CompressError(f"budget.{name}: expected more than 0, found {getattr(self, name)}")
        if not 0 <= self.min_score_share <= 1:
            raise CompressError(
                "budget.min_score_share: expected a share from 0 to 1 of the teacher's score, found "
                f"{self.min_score_share}"
            )
        for name, smallest in (("batch", 0), ("threads", 1), ("rounds", 1), ("retries", 0)):
            if getattr(self, name) < smallest:
                raise CompressError(f"budget.{name}: expected at least {smallest}, found {getattr(self, name)}")
        if not all(re.fullmatch(r"\s*\d+\s*", part) for part in self.length.split(",")):
            raise CompressError(
                f"budget.length: expected a number of tokens, or several such as 16,64,256, found {self.length!r}"
            )
        if len(set(self.lengths)) < len(self.lengths):
            raise CompressError(f"budget.length: expected different lengths, found one twice in {self.length!r}")
        check_runtime(self.runtime, self.precision)
        if len(self.size_limits) not in (0, 1, len(self.speedups)):
            several = f", or one for each of {self.speedup}" if self.speedup else ""
            raise CompressError(f"budget.max_bytes: expected one size{several}, found {self.max_bytes!r}")

    def timing_settings(self) -> dict[str, object]:
        """Returns the conditions of measurements, for stage keys, which mustn't change at the default of a new one."""
        rounds = {} if self.rounds == ROUNDS else {"rounds": self.rounds}
        length = self.lengths[0] if len(self.lengths) == 1 else list(self.lengths)
        conditions = {name: getattr(self, name) for name in ("runtime", "precision", "batch", "threads")}
        return conditions | {"length": length} | rounds

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens per text at which the speed must hold, in ascending order; 0 for the lengths of the data set."""
        return tuple(sorted(int(part) for part in self.length.split(",")))

    @property
    def requested(self) -> bool:
        """Whether a speed-up, a latency or a throughput is set, so that the model is pruned."""
        return self.frontier or any(getattr(self, name) for name in _TARGETS)

    def resolve(self) -> "Budget":
        """Returns the budget with its own batch, precision and speeds; without a target the precision stays auto."""
        batch = self.batch or (THROUGHPUT_BATCH if self.texts_per_second else 1)
        precision = self.precision
        if self.requested and precision == "auto":
            precision = "int8" if self.runtime == "onnxruntime" else "fp32"
        speedup = self.speedup or (FRONTIER if self.frontier else "")
        return replace(self, batch=batch, precision=precision, speedup=speedup)

    @property
    def speedups(self) -> tuple[float, ...]:
        """The requested speed-ups in ascending order."""
        parts = [part.strip() for part in self.speedup.split(",")] if self.speedup else []
        if not all(re.fullmatch(r"\d+(\.\d+)?", part) for part in parts):
            raise CompressError(f"budget.speedup: expected numbers such as 10 or 2,4,8,15, found {self.speedup!r}")
        speedups = sorted(map(float, parts))
        duplicates = [each for each, following in pairwise(speedups) if each == following]
        if duplicates:
            raise CompressError(
                f"budget.speedup: expected different speed-ups, found {duplicates[0]:g} twice in {self.speedup!r}; "
                "remove one of them"
            )
        return tuple(speedups)

    @property
    def size_limits(self) -> tuple[int, ...]:
        """The requested maximum sizes in bytes, in the order of `speedup`."""
        return tuple(parse_bytes(part) for part in self.max_bytes.split(",")) if self.max_bytes else ()

    def find_max_bytes(self, speedup: float = 0.0) -> int | None:
        """Returns the maximum size in bytes of the files at a speed-up, None if unbounded."""
        if len(self.size_limits) < 2:
            return self.size_limits[0] if self.size_limits else None
        return self.size_limits[[float(part) for part in self.speedup.split(",")].index(speedup)]


def check_runtime(runtime: str, precision: str) -> None:
    """Checks that the runtime is installed and supports the precision.

    Raises:
        CompressError: The runtime is unknown, isn't installed or can't run the precision.
    """
    if runtime not in _RUNTIMES:
        raise CompressError(f"budget.runtime: expected {', '.join(_RUNTIMES)}, found {runtime!r}")
    if runtime != "pytorch" and find_spec(runtime) is None:
        raise CompressError(
            f"budget.runtime {runtime!r}: it is not installed here, so nothing can be measured on it; "
            f"pip install -e '.[{runtime}]'"
        )
    if runtime != "onnxruntime" and precision == "int8":
        raise CompressError(
            f"budget.precision int8: expected runtime onnxruntime, found {runtime}: use --budget.precision fp32"
        )


def parse_bytes(text: str, setting: str = "budget.max_bytes") -> int:
    """Parses a size: `10MB` -> 10,000,000; `8MiB` -> 8,388,608. Errors name the setting.

    Raises:
        CompressError: The text isn't a number with one of the known units.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if not match or match.group(2).lower() not in UNITS:
        raise CompressError(f"{setting}: expected a size such as 10MB, 8MiB or 500000, found {text!r}")
    return int(float(match.group(1)) * UNITS[match.group(2).lower()])
