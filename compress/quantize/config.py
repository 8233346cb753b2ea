"""How a model is quantized: the scheme, and how its numbers are found."""

from dataclasses import dataclass
from typing import Literal

from compress.errors import CompressError
from compress.quantize.schemes import scheme_of

AUTO = 0.99  # share of the score that --quantize auto keeps


@dataclass(frozen=True)
class QuantizeConfig:
    """Settings of quantization.

    Args:
        scheme: int8-static, int8-dynamic, int8-weights, int4-weights or int4-dynamic, see `SCHEMES`; int8 is
            int8-static; auto is int8-static with a min_score of 0.99; empty leaves the model in float.
        method: qat trains the student as it will be deployed, on the teacher's signals; ptq only calibrates it.
        ranges: Of activations with a scale a tensor: minmax, percentile, or mse (least squared error).
        weights: nearest: to the nearest integer; gptq: those not yet rounded make up for errors; awq: weights that meet
            large inputs get finer steps.
        smooth: SmoothQuant's alpha: how far outliers of activations move into weights; 0: not at all.
        min_score: Share of the float model's validation score that calibration has to keep: layers that bear rounding
            least get 8 bits instead of 4, or stay in float, until it does.
        learned: Also train the scales of activations (LSQ).
        samples: Training texts that ranges are told from.
        epochs: Of qat.
        learning_rate: Of qat; its schedule and the rest are those of the student's training.
        keep: Patterns of layers that stay in float, separated by commas, as `*.pooler.dense,classifier`.
    """

    scheme: str = ""
    method: Literal["qat", "ptq"] = "qat"
    ranges: Literal["minmax", "percentile", "mse"] = "minmax"
    weights: Literal["nearest", "gptq", "awq"] = "nearest"
    smooth: float = 0.0
    min_score: float = 0.0
    learned: bool = False
    samples: int = 256
    epochs: int = 2
    learning_rate: float = 1e-4
    keep: str = ""

    def __post_init__(self) -> None:
        if self.scheme == "auto":
            object.__setattr__(self, "min_score", self.min_score or AUTO)
        if self.scheme in ("int8", "auto"):
            object.__setattr__(self, "scheme", "int8-static")
        if self.scheme:
            scheme_of(self.scheme)
        for name in ("samples", "epochs"):
            if getattr(self, name) < 1:
                raise CompressError(f"quantize.{name}: expected at least 1, found {getattr(self, name)}")
        for name in ("smooth", "min_score"):
            if not 0 <= getattr(self, name) <= 1:
                raise CompressError(f"quantize.{name}: expected a number from 0 to 1, found {getattr(self, name)}")
        if not self.learning_rate > 0:
            raise CompressError(f"quantize.learning_rate: expected more than 0, found {self.learning_rate}")

    @property
    def kept(self) -> tuple[str, ...]:
        return tuple(pattern.strip() for pattern in self.keep.split(",") if pattern.strip())
