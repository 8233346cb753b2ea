"""How a model is quantized: the scheme, and how its numbers are found."""

from dataclasses import dataclass
from typing import Literal

from compress.errors import CompressError
from compress.quantize.schemes import SCHEMES, multiplies_bytes, schemes_named

Reduced = bool | Literal["auto"]
Processor = Literal["here", "avx2", "avx512", "vnni", "arm"]
AUTO = 0.99  # share of the score that --quantize auto keeps


@dataclass(frozen=True)
class QuantizeConfig:
    """Settings of quantization.

    Args:
        scheme: int8-static, int8-dynamic, int8-weights, int4-weights, int4-dynamic, fp8-weights or fp8-dynamic, see
            `SCHEMES`; int8 takes int8-static for each format that holds it, int8-dynamic for the others, and makes a
            student of each that is needed; so does int4 with int4-weights; fp8 is fp8-dynamic; auto is int8 with a
            min_score of 0.99; empty: in float.
        method: qat trains the student as it will be deployed, on the teacher's signals; ptq only calibrates it.
        ranges: Of activations with a scale a tensor: minmax, percentile, or mse (least squared error).
        weights: nearest: to the nearest integer; gptq: those not yet rounded make up for errors; awq: weights that meet
            large inputs get finer steps.
        smooth: SmoothQuant's alpha: how far outliers of activations move into weights; 0: not at all.
        min_score: Share of the float model's validation score that calibration has to keep: layers that bear rounding
            least get 8 bits instead of 4, or stay in float, until it does.
        learned: Also train the scales, those of weights and of activations (LSQ).
        reduced: 7 bits for weights whose inputs have 8: x86 processors without VNNI saturate larger products on ONNX
            Runtime and OpenVINO. auto takes them where one of these files is exported and `processor` needs it.
        processor: Where the files will run, which reduced auto is about: here is this machine; avx2 and avx512 are x86
            without VNNI, vnni is x86 with it, arm is any ARM.
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
    reduced: Reduced = "auto"
    processor: Processor = "here"
    samples: int = 256
    epochs: int = 2
    learning_rate: float = 1e-4
    keep: str = ""

    def __post_init__(self) -> None:
        if self.scheme == "auto":
            object.__setattr__(self, "min_score", self.min_score or AUTO)
            object.__setattr__(self, "scheme", "int8")
        if self.scheme:
            self.check_scheme()
        if self.processor != "here" and self.reduced != "auto":
            raise CompressError(
                f"quantize.processor {self.processor}: expected quantize.reduced auto, found "
                f"{str(self.reduced).lower()}: it would have no effect; leave one of the two out"
            )
        for name in ("samples", "epochs"):
            if getattr(self, name) < 1:
                raise CompressError(f"quantize.{name}: expected at least 1, found {getattr(self, name)}")
        for name in ("smooth", "min_score"):
            if not 0 <= getattr(self, name) <= 1:
                raise CompressError(f"quantize.{name}: expected a number from 0 to 1, found {getattr(self, name)}")
        if not self.learning_rate > 0:
            raise CompressError(f"quantize.learning_rate: expected more than 0, found {self.learning_rate}")

    def check_scheme(self) -> None:
        """
        Raises:
            CompressError: A scheme that isn't known, or a setting that no scheme of that name reads.
        """
        schemes = [SCHEMES[name] for name in schemes_named(self.scheme)]
        if self.ranges != "minmax" and all(each.inputs != "tensor" for each in schemes):
            raise CompressError(
                f"quantize.ranges {self.ranges}: expected int8-static, found {self.scheme}: no range is kept of its "
                "inputs; leave quantize.ranges out"
            )
        if not any(multiplies_bytes(each) for each in schemes):
            for name, requested in (("reduced", self.reduced is True), ("processor", self.processor != "here")):
                if requested:
                    raise CompressError(
                        f"quantize.{name}: expected a scheme with products of bytes, found {self.scheme}: it has none "
                        "that saturate; leave it out"
                    )
        if self.learned and self.method == "ptq":
            raise CompressError("quantize.learned: expected method qat, found ptq: nothing is trained")

    @property
    def kept(self) -> tuple[str, ...]:
        return tuple(pattern.strip() for pattern in self.keep.split(",") if pattern.strip())
