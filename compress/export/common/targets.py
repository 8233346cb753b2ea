"""Export formats and targets: the runtime of each format, and the schemes it doesn't support."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec

from compress.errors import CompressError
from compress.quantize.schemes import SCHEMES, resolve_schemes

FLOAT = "fp32"
_PRECISIONS = (FLOAT, "int8", "int4", "fp8")
EXTRAS = {  # formats whose library is this package's extra of the same name -> module to import
    "openvino": "openvino",
    "executorch": "executorch",
    "litert": "litert_torch",
    "compressed-tensors": "compressed_tensors",
    "model2vec": "model2vec",
    "static-embedding": "sentence_transformers",
}


@dataclass(frozen=True)
class Format:
    """A file format.

    Args:
        name: Name in the settings.
        runtime: Runtime that executes it.
        supports_float, supports_quantized: Whether it supports models that aren't quantized, and those that are.
        tolerance: Largest difference of a float model's logits, which may come from another order of sums only.
        saturates: Whether its runtime saturates byte products on x86 processors without VNNI.
        unsupported: Scheme -> reason.
        attention: Whether it supports models with attention.
        reads_texts: Whether it is the folder of a library that computes vectors of texts, with its own tokenizer and
            config; it holds the table of a static student, and no head.
    """

    name: str
    runtime: str
    supports_float: bool = True
    supports_quantized: bool = True
    tolerance: float = 1e-3
    saturates: bool = False
    unsupported: Mapping[str, str] = field(default_factory=dict)
    attention: bool = True
    reads_texts: bool = False


NO_FLOAT8 = {
    scheme.name: "it has no fp8 matrix multiplication on CPUs; use int8"
    for scheme in SCHEMES.values()
    if scheme.is_float8
}

NO_GROUPS = dict.fromkeys(
    (scheme.name for scheme in SCHEMES.values() if scheme.input_scales == "group"),
    "only ONNX Runtime quantizes inputs by group; export onnxruntime",
)

FORMATS: Mapping[str, Format] = {
    each.name: each
    for each in (
        Format("huggingface", "pytorch", supports_quantized=False, tolerance=1e-4),
        Format("onnx", "onnxruntime", saturates=True, unsupported=NO_FLOAT8 | NO_GROUPS),
        Format("onnxruntime", "onnxruntime", saturates=True, unsupported=NO_FLOAT8),
        Format("onnx-decoder", "onnxruntime", saturates=True, unsupported=NO_FLOAT8),  # has a cache, for generation
        Format(
            "openvino",
            "openvino",
            saturates=True,
            unsupported=dict.fromkeys(
                ("int8-dynamic", "int4-dynamic"),
                "OpenVINO dequantizes matrix products with scales of each call to float32, as large and slow as the "
                "float model; use int8-static",
            )
            | NO_FLOAT8
            | NO_GROUPS,
        ),
        Format(
            "executorch",
            "executorch",
            unsupported={
                "int8-static": "XNNPACK's statically quantized products return int8, but this scheme needs float "
                "outputs, so they would be computed in float; use int8-dynamic",
                "int8-weights": "XNNPACK can't multiply float inputs by int8 weights; use int8-dynamic",
                "int4-weights": "XNNPACK can't multiply float inputs by int4 weights; use int4-dynamic",
            }
            | NO_FLOAT8
            | NO_GROUPS,
        ),
        Format(
            "litert",
            "litert",
            unsupported={
                "int8-static": "XNNPACK's statically quantized products return int8, but this scheme needs float "
                "outputs, and LiteRT's own int32 kernels are slower than float; use int8-dynamic",
                "int4-weights": "LiteRT can't multiply float inputs by grouped int4 weights; dequantized they would be "
                "as large as float and several times slower; use int4-dynamic",
            }
            | NO_FLOAT8
            | NO_GROUPS,
        ),
        Format(
            "torchao",
            "pytorch",
            supports_float=False,
            tolerance=1e-4,
            unsupported={
                "int8-static": "transformers doesn't load the scales of activations of a torchao checkpoint",
                "int4-dynamic": "torchao's safetensors format can't represent int4 weights with quantized inputs",
            }
            | NO_GROUPS,
        ),
        Format("compressed-tensors", "pytorch", supports_float=False, tolerance=1e-4, unsupported=NO_GROUPS),
        Format(
            "numpy",
            "numpy",
            attention=False,
            unsupported=dict.fromkeys(
                ("int8-dynamic", "int4-dynamic"),
                "its reader can't compute scales per call; use int8-static",
            )
            | {"int4-weights": "numpy has no 4-bit integers; use int8-weights"}
            | NO_FLOAT8
            | NO_GROUPS,
        ),
        *(
            Format(name, name, supports_quantized=False, tolerance=1e-5, attention=False, reads_texts=True)
            for name in ("model2vec", "static-embedding")
        ),
    )
}


@dataclass(frozen=True)
class ExportTarget:
    """A format in float32 or with quantized weights.

    Args:
        format: Name of the format.
        precision: Of the weights, one of `_PRECISIONS`.
    """

    format: str
    precision: str = FLOAT

    def __str__(self) -> str:
        """Returns the target's name, as requested and as its folder is called."""
        return f"{self.format}-{self.precision}" if self.is_quantized else self.format

    @property
    def kind(self) -> Format:
        """The format of the target's files."""
        return FORMATS[self.format]

    @property
    def is_quantized(self) -> bool:
        """Whether the target stores quantized weights as they were trained."""
        return self.precision != FLOAT

    @property
    def where(self) -> tuple[str, str]:
        """(runtime, precision)."""
        return self.kind.runtime, self.precision

    @property
    def made_from(self) -> "ExportTarget | None":
        """The target whose file is the source of this one, or None."""
        source = {
            ("onnxruntime", False): ExportTarget("onnx"),
            ("openvino", False): ExportTarget("onnx"),
            ("onnx", True): ExportTarget("onnx"),
            ("onnx-decoder", True): ExportTarget("onnx-decoder"),
            ("onnxruntime", True): ExportTarget("onnxruntime"),
            ("openvino", True): ExportTarget("onnx", self.precision),
        }
        return source.get((self.format, self.is_quantized))

    @property
    def measured(self) -> bool:
        """Whether its speed is measured; that of formats that share a runtime with another one isn't."""
        return self.format not in ("onnx", "onnx-decoder", "compressed-tensors") and not self.kind.reads_texts


def find_target(name: str) -> ExportTarget:
    """Returns the target of a name.

    Raises:
        CompressError: The name is unknown.
    """
    for precision in _PRECISIONS:
        for each in FORMATS.values():
            target = ExportTarget(each.name, precision)
            if str(target) == name and (each.supports_quantized if target.is_quantized else each.supports_float):
                return target
    raise CompressError(f"export: expected {', '.join(FORMATS)}, or one with -int8, -int4 or -fp8, found {name!r}")


def parse_formats(text: str) -> tuple[str, ...]:
    """Returns the names of formats in a comma-separated list.

    Raises:
        CompressError: The list is empty, or a name is unknown.
    """
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in FORMATS]
    if unknown or not names:
        raise CompressError(f"export: expected one or several of {', '.join(FORMATS)}, found {text!r}")
    return names


def by_scheme(formats: Iterable[str], name: str) -> dict[str, list[str]]:
    """Returns each needed scheme of a name, in order of preference -> the formats that use it.

    Raises:
        CompressError: A format supports none of the schemes.
    """
    schemes = resolve_schemes(name)
    assigned: dict[str, list[str]] = {scheme: [] for scheme in schemes}
    for each in formats:
        accepted = next((scheme for scheme in schemes if scheme not in FORMATS[each].unsupported), None)
        if accepted is None:
            raise CompressError(f"export {each}: doesn't support {name}: {FORMATS[each].unsupported[schemes[0]]}")
        assigned[accepted].append(each)
    return {scheme: taken for scheme, taken in assigned.items() if taken}


def check_float(formats: Iterable[str], what: str) -> None:
    """Checks that every format supports models that aren't quantized.

    Raises:
        CompressError: A format supports quantized models only.
    """
    for name in formats:
        if not FORMATS[name].supports_float:
            raise CompressError(
                f"export {name}: expected a quantized model, found {what}, in float: this format holds quantized "
                "weights only; python -m pipelines.quantize, or --quantize of a run, makes one"
            )


def check_installed(formats: Iterable[str]) -> None:
    """Checks that the formats' libraries are installed.

    Raises:
        CompressError: The library of a format isn't installed.
    """
    for name in formats:
        if name in EXTRAS and find_spec(EXTRAS[name]) is None:
            raise CompressError(
                f"export {name}: expected its runtime to be installed, found none; pip install -e '.[{name}]'"
            )


def with_sources(targets: Iterable[ExportTarget]) -> list[ExportTarget]:
    """Returns the targets and those they are made from, sources first."""
    ordered: list[ExportTarget] = []
    for target in targets:
        chain = [target]
        while (source := chain[-1].made_from) is not None:
            chain.append(source)
        ordered += [each for each in reversed(chain) if each not in ordered]
    return ordered
