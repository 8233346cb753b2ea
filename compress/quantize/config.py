"""Quantization settings: the scheme, and how scales and quantized weights are determined."""

from dataclasses import dataclass
from typing import Literal

from compress.errors import CompressError
from compress.quantize.schemes import SCHEMES, has_integer_products, resolve_schemes

ReduceRange = bool | Literal["auto"]
Processor = Literal["here", "avx2", "avx512", "vnni", "arm"]
UNUSED_BY_PTQ = ("epochs", "learning_rate", "learned_scales")
AUTO_MIN_SCORE = 0.99  # share of the float score that --quantize auto preserves


@dataclass(frozen=True)
class QuantizeConfig:
    """Settings of quantization.

    Args:
        scheme: int8-static, int8-dynamic, int8-weights, int4-weights, int4-dynamic, int8-groups, int4-groups,
            fp8-weights or fp8-dynamic (docs/howto/quantize.md). int8 selects int8-static for each format that supports
            it and int8-dynamic for the others, and produces one student per scheme needed; int4 does the same,
            preferring int4-weights; fp8 is fp8-dynamic; auto is int8 with a min_score_share of 0.99; empty: no
            quantization.
        method: qat trains the student with simulated quantization on the teacher's signals; ptq only calibrates it.
        ranges: Range estimator for activations with per-tensor scales: minmax, percentile, or mse (least squared
            error).
        rounding: nearest: round to nearest; gptq: weights not yet rounded compensate for rounding errors; awq: weights
            that multiply large inputs get finer steps.
        smoothquant: SmoothQuant's alpha: how far activation outliers are moved into the weights; 0: not at all.
        min_score_share: Share of the float model's validation score that calibration must preserve: the most sensitive
            layers get 8 bits instead of 4, or stay in float, until it is reached.
        learned_scales: Also train the scales of weights and activations (LSQ).
        reduce_range: Use 7-bit weights with 8-bit inputs: on x86 processors without VNNI, larger products saturate in
            ONNX Runtime and OpenVINO. auto uses 7 bits if one of these formats is exported and `processor` needs it.
        processor: Processor the files will run on; used only if `reduce_range` is auto. here is this machine; avx2 and
            avx512 are x86 without VNNI, vnni is x86 with it, arm is any ARM.
        samples: Number of training texts used for calibration.
        epochs: Epochs of qat.
        learning_rate: Learning rate of qat; its schedule and the other training settings are those of the student.
        float_layers: Patterns of layers that stay in float, separated by commas, such as `*.pooler.dense,classifier`.

    Raises:
        CompressError: A value is out of range, or a setting has no effect with the others.
    """

    scheme: str = ""
    method: Literal["qat", "ptq"] = "qat"
    ranges: Literal["minmax", "percentile", "mse"] = "minmax"
    rounding: Literal["nearest", "gptq", "awq"] = "nearest"
    smoothquant: float = 0.0
    min_score_share: float = 0.0
    learned_scales: bool = False
    reduce_range: ReduceRange = "auto"
    processor: Processor = "here"
    samples: int = 256
    epochs: int = 2
    learning_rate: float = 1e-4
    float_layers: str = ""

    def __post_init__(self) -> None:
        for name in UNUSED_BY_PTQ if self.method == "ptq" else ():
            if getattr(self, name) != getattr(type(self), name):
                raise CompressError(
                    f"quantize.{name} {getattr(self, name)}: expected method qat with it, found ptq, which only "
                    "calibrates"
                )
        if self.scheme and self.scheme != "auto":
            self._check_scheme()
        if self.processor != "here" and self.reduce_range != "auto":
            raise CompressError(
                f"quantize.processor {self.processor}: expected quantize.reduce_range auto, found "
                f"{str(self.reduce_range).lower()}: the processor would have no effect; leave one of the two out"
            )
        for name in ("samples", "epochs"):
            if getattr(self, name) < 1:
                raise CompressError(f"quantize.{name}: expected at least 1, found {getattr(self, name)}")
        for name in ("smoothquant", "min_score_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise CompressError(f"quantize.{name}: expected a number from 0 to 1, found {getattr(self, name)}")
        if not self.learning_rate > 0:
            raise CompressError(f"quantize.learning_rate: expected more than 0, found {self.learning_rate}")

    def _check_scheme(self) -> None:
        schemes = [SCHEMES[name] for name in resolve_schemes(self.scheme)]
        if self.ranges != "minmax" and all(each.input_scales != "tensor" for each in schemes):
            raise CompressError(
                f"quantize.ranges {self.ranges}: expected scheme int8-static, found {self.scheme}: it has no "
                "calibrated input ranges; leave quantize.ranges out"
            )
        if not any(has_integer_products(each) for each in schemes):
            for name, requested in (
                ("reduce_range", self.reduce_range is True),
                ("processor", self.processor != "here"),
            ):
                if requested:
                    raise CompressError(
                        f"quantize.{name}: expected a scheme with integer products, found {self.scheme}: it has no "
                        f"products that can saturate; leave quantize.{name} out"
                    )

    @property
    def float_patterns(self) -> tuple[str, ...]:
        """Patterns of the names of layers that stay in float."""
        return tuple(pattern.strip() for pattern in self.float_layers.split(",") if pattern.strip())
